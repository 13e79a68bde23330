"""Connection of the first rank to another one. A thread reads its messages, and kills its process if none come."""

import os
import pickle
import queue
import socket
import subprocess
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from specdec.parallel.other_ranks import Process
from specdec.parallel.ranks import BEAT, MOST_IDLE, Alive, Failure, Hung, Shared

# Beats that a rank may miss before it counts as hung. They are counted rather than timed: a machine that stands still
# stops both ranks.
MOST_MISSED = 8


class RankLink:
    """A rank's process and the connection to it, which a thread reads.

    A rank that is silent, such as a stopped one, or hangs is killed, so that operations which wait for it end.
    """

    def __init__(self, connection: Connection, process: Process) -> None:
        self._connection, self._process = connection, process
        self._answers: queue.SimpleQueue[Shared | None] = queue.SimpleQueue()
        self._failure: Failure | None = None
        self._ended = threading.Event()
        self._fault: str | None = None
        self._reader = threading.Thread(target=self._read, name="rank link", daemon=True)
        self._reader.start()

    def send(self, data: bytes) -> None:
        """Send a pickled message.

        Raises:
            OSError: the rank is gone, or takes no messages.
        """
        self._connection.send_bytes(data)

    def answer(self, timeout: float) -> Shared | None:
        """Return the next value that the rank shares; None if none comes in `timeout` seconds, or the rank is gone."""
        try:
            found = self._answers.get(timeout=timeout)
        except queue.Empty:
            return None
        if found is None:
            # Nothing follows, however often it is asked for.
            self._answers.put(None)
        return found

    @property
    def is_alive(self) -> bool:
        """True while the rank is there and has not failed."""
        return not (self._failure or self._ended.is_set() or self._fault)

    def end(self, timeout: float) -> str | None:
        """Return how the rank has ended, if it ends within `timeout` seconds without a reason of its own."""
        ended = self._ended.wait(0 if self._fault else timeout)
        if self._fault is not None:
            return self._fault
        if not ended or self._failure is not None:
            return None
        # A killed process closes its connection some time before its end.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        code = self._process.poll()
        return "has ended" + (f" with exit code {code}" if code else "")

    @property
    def failure(self) -> str | None:
        """Why the rank has failed, if it has said so."""
        return self._failure and self._failure.reason

    def close(self) -> None:
        """Close the connection, at which the rank ends."""
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
                        self._give_up(f"has given no sign of life for {MOST_MISSED * BEAT:g} seconds")
        self._ended.set()
        self._answers.put(None)

    def _give_up(self, fault: str) -> None:
        self._fault = fault
        self._process.kill()

    def _hear(self, said: Alive | Hung | Shared | Failure) -> bool:
        """Keep what the rank says; return whether it is a sign of life alone."""
        if isinstance(said, Failure):
            self._failure = said
        elif isinstance(said, Hung):
            self._give_up(f"hangs: it has done nothing for {MOST_IDLE * BEAT:g} seconds")
        elif isinstance(said, Shared):
            self._answers.put(said)
        return isinstance(said, Alive)
