"""Link of the first rank to another one: a thread reads its answers beside the engine's work, and notices silence."""

import os
import pickle
import queue
import socket
import subprocess
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from specdec.building.rank_messages import BEAT, Alive, Answer, Failure, Refusal, Transferred
from specdec.building.started_ranks import Process

# Beats that a rank may miss before it counts as hung. They are counted rather than timed: a machine that stands still
# stops both ranks.
MOST_MISSED = 8


class RankLink:
    """A follower's process and the connection to it, which a thread reads.

    A follower that is silent, such as a stopped one, is killed, so that operations which wait for it end.
    """

    def __init__(self, connection: Connection, process: Process) -> None:
        self._connection, self._process = connection, process
        self._answers: queue.SimpleQueue[int | Refusal | None] = queue.SimpleQueue()
        self._transferred: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._failure: Failure | None = None
        self._ended, self._silent = threading.Event(), threading.Event()
        self._reader = threading.Thread(target=self._read, name="rank link", daemon=True)
        self._reader.start()

    def send(self, data: bytes) -> None:
        """Send a pickled message.

        Raises:
            OSError: the follower is gone, or takes no messages.
        """
        self._connection.send_bytes(data)

    def answer(self, timeout: float) -> int | Refusal | None:
        """Return the next answer; None if none comes within `timeout` seconds, or the follower is gone."""
        with suppress(queue.Empty):
            return self._answers.get(timeout=timeout)
        return None

    def take_transferred(self) -> list[Any]:
        """Return what the follower's connector has done since the last call, without waiting."""
        return [self._transferred.get() for _ in range(self._transferred.qsize())]

    @property
    def is_alive(self) -> bool:
        """True while the follower is there and has not failed."""
        return not (self._failure or self._ended.is_set() or self._silent.is_set())

    def end(self, timeout: float) -> str | None:
        """Return how the follower has ended, if it ends within `timeout` seconds without a reason of its own."""
        if self._silent.is_set():
            return f"has given no sign of life for {MOST_MISSED * BEAT:g} seconds"
        if not self._ended.wait(timeout) or self._failure is not None:
            return None
        # A killed process closes its connection some time before its end.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        code = self._process.poll()
        return "has ended" + (f" with exit code {code}" if code else "")

    @property
    def failure(self) -> str | None:
        """Why the follower has failed, if it has said so."""
        return self._failure and self._failure.reason

    def close(self) -> None:
        """Close the connection, at which the follower ends."""
        # The thread must not read a descriptor that is closed and perhaps used anew.
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        num_missed, has_beaten = 0, False
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                if self._connection.poll(BEAT):
                    num_missed = 0
                    has_beaten |= self._hear(self._connection.recv())
                elif has_beaten:
                    num_missed += 1
                    if num_missed == MOST_MISSED:
                        self._silent.set()
                        self._process.kill()
        self._ended.set()
        self._answers.put(None)

    def _hear(self, said: Answer) -> bool:
        """Keep an answer; return whether it is none but a sign of life."""
        if isinstance(said, Failure):
            self._failure = said
        elif isinstance(said, Transferred):
            self._transferred.put(said.output)
        elif isinstance(said, int | Refusal):
            self._answers.put(said)
        return isinstance(said, Alive)
