"""The front end's side of an engine process's loop that runs in a thread of the test."""

import threading
from collections import deque

import msgspec
import zmq

from specdec import LLM, SamplingParams
from specdec.async_engine.engine_loop import EngineLoop
from specdec.async_engine.messages import (
    Call,
    Cancel,
    Heartbeat,
    Replies,
    ToEngine,
    decode_from_engine,
    encode,
    encode_command,
)
from specdec.core.commands import Add, AnyCommand, Delta, EngineReply, News, Stop
from tests.specdec.async_engine.served import SHORT

WAIT_MS = 20_000


class Peer:
    """The front end's side of a loop in a thread."""

    def __init__(self, llm: LLM, most_messages: int = 1) -> None:
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.socket, other = self.context.socket(zmq.DEALER), self.context.socket(zmq.DEALER)
        self.socket.rcvhwm = other.sndhwm = most_messages
        self.socket.linger = other.linger = 0
        self.socket.bind("inproc://engine")
        other.connect("inproc://engine")
        self.loop = EngineLoop(llm.engine, other)
        self.error: Exception | None = None
        self._unread: deque[tuple[int, EngineReply]] = deque()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def cancel(self, *numbers: int) -> None:
        self.send(*map(Cancel, numbers))

    def stop(self) -> None:
        self.send(call(-1, Stop()))

    def receive(self) -> tuple[int, EngineReply]:
        """Return the next reply, behind the number of its call."""
        while not self._unread:
            assert self.socket.poll(WAIT_MS), "no message came"
            message = decode_from_engine(self.socket.recv())
            if not isinstance(message, Heartbeat):
                assert isinstance(message, Replies)
                self._unread.extend((each.number, each.reply()) for each in message.replies)
        return self._unread.popleft()

    def ended(self, *numbers: int) -> dict[int, list[Delta]]:
        """Read until these requests have ended; return all deltas."""
        deltas: dict[int, list[Delta]] = {number: [] for number in numbers}
        while not all(found and found[-1].finish_reason for found in deltas.values()):
            number, news = self.receive()
            assert isinstance(news, News)
            deltas[number] += news.deltas
        return deltas

    def close(self) -> None:
        self.stop()
        self.thread.join(WAIT_MS / 1000)
        assert not self.thread.is_alive()
        self.context.destroy(linger=0)


def call(number: int, command: AnyCommand) -> Call:
    return Call(number, msgspec.Raw(encode_command(command)))


def add(number: int, prompt: list[int], params: SamplingParams = SHORT, priority: int = 0) -> Call:
    return call(number, Add(prompt, params, priority))
