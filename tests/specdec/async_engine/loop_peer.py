"""The front end's side of an engine process's loop that runs in a thread of the test."""

import threading
from typing import Any

import msgspec
import zmq

from specdec import LLM
from specdec.async_engine.engine_loop import EngineLoop
from specdec.async_engine.messages import (
    Add,
    Delta,
    FromEngine,
    Heartbeat,
    News,
    Stop,
    ToEngine,
    decode_from_engine,
    encode,
)
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
        self.loop = EngineLoop(llm, other)
        self.error: Exception | None = None
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

    def receive(self) -> FromEngine:
        """Return the next message that is not a heartbeat."""
        message: FromEngine = Heartbeat()
        while isinstance(message, Heartbeat):
            assert self.socket.poll(WAIT_MS), "no message came"
            message = decode_from_engine(self.socket.recv())
        return message

    def ended(self, *numbers: int) -> dict[int, list[Delta]]:
        """Read until these requests have ended; return all deltas."""
        deltas: dict[int, list[Delta]] = {number: [] for number in numbers}
        while not all(found and found[-1].finish_reason for found in deltas.values()):
            message = self.receive()
            assert isinstance(message, News)
            for delta in message.deltas:
                deltas[delta.number].append(delta)
        return deltas

    def close(self) -> None:
        self.send(Stop())
        self.thread.join(WAIT_MS / 1000)
        assert not self.thread.is_alive()
        self.context.destroy(linger=0)


def add(number: int, prompt: list[int], params: Any = SHORT, priority: int = 0) -> Add:
    return Add(number, prompt, msgspec.Raw(encode(params)), priority, None)
