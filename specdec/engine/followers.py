"""The processes of the ranks beside the first, as the first one sees them."""

import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from specdec.config import EngineConfig
from specdec.engine.rank_messages import DONE, Failure, Join, Message, Refusal
from specdec.execution.executor import ExecutorDeadError
from specdec.models.rank_group import RankGroup, file_store

# Seconds in which a follower's process must have imported, loaded its weights, or made its cache.
START_TIMEOUT = 600.0
# Seconds of a collective operation and of a message, after which a rank counts as hung. Ranks compute the same, so that
# they come to an operation at about the same time.
COLLECTIVE_TIMEOUT = 30.0
# Seconds for the followers to say why they failed, and for each to end by itself.
_LAST_WORDS, _END = 1.0, 2.0


class Process(Protocol):
    """A started follower; `subprocess.Popen` is one."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def launched(descriptor: int) -> Process:
    """Start a follower that inherits a socket. Ctrl-C in a terminal reaches the first rank alone."""
    modules = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "specdec.engine.follower", str(descriptor)],
        stdin=subprocess.DEVNULL,
        # Standard output is the program's own.
        stdout=2,
        env={**os.environ, "PYTHONPATH": modules},
        pass_fds=(descriptor,),
        start_new_session=True,
    )


class Followers:
    """All ranks but the first, in processes of this machine.

    Their connections end with this process, and they with their connections.
    """

    def __init__(self, config: EngineConfig, timeout: float = COLLECTIVE_TIMEOUT) -> None:
        self.size, self._timeout = config.tensor_parallel_size, timeout
        self._folder = TemporaryDirectory(prefix="specdec-ranks-")
        self._store = str(Path(self._folder.name) / "store")
        self._processes: list[Process] = []
        self._connections: list[Connection] = []
        self._error: ExecutorDeadError | None = None
        for rank in range(1, self.size):
            own, other = socket.socketpair()
            # A follower that takes no messages, such as a stopped one, must not keep this process waiting.
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout), 0))
            with other:
                self._processes.append(launched(other.fileno()))
            self._connections.append(Connection(own.detach()))
            self._tell(rank, pickle.dumps(Join(config, rank, self._store, timeout)))

    def group(self, device: torch.device) -> RankGroup:
        """Wait until all are there, and return the group of all ranks."""
        self.wait()
        try:
            return RankGroup(0, self.size, file_store(self._store, self.size), device, self._timeout)
        except RuntimeError as error:
            raise self.failed(error) from None

    def tell(self, message: Message) -> None:
        """Send a message to all."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank in range(1, self.size):
            self._tell(rank, data)

    def _tell(self, rank: int, data: bytes) -> None:
        try:
            self._connections[rank - 1].send_bytes(data)
        except OSError as error:
            raise self.failed(error) from None

    def wait(self) -> str | None:
        """Wait until all have done what they were told; return the reason if one has refused it.

        Raises:
            ExecutorDeadError: one has failed, with its reason.
        """
        refusal = None
        for connection in self._connections:
            try:
                answer = connection.recv() if connection.poll(START_TIMEOUT) else None
            except (EOFError, OSError):
                answer = None
            if isinstance(answer, Refusal):
                refusal = answer.reason
            elif answer != DONE:
                raise self.failed(TimeoutError(f"no answer in {START_TIMEOUT:g} seconds"))
        return refusal

    def check(self) -> None:
        """Check that all are there.

        Raises:
            ExecutorDeadError: one is gone, now or earlier.
        """
        if self._error is None and all(process.poll() is None for process in self._processes):
            return
        raise self.failed(RuntimeError("its process is gone"))

    def failed(self, error: BaseException) -> ExecutorDeadError:
        """End all followers, and return the error that says why the ranks cannot go on.

        Args:
            error: as the first rank saw it; a follower's own reason goes before it.
        """
        if self._error is None:
            reason = self._reason() or f"rank 0 of {self.size} could not go on: {_line(error)}"
            self._error = ExecutorDeadError(f"{reason}; the engine must be started anew")
            self.kill()
        return ExecutorDeadError(str(self._error))

    def _reason(self) -> str | None:
        """Return why a follower has ended, if one has."""
        end, failed = time.monotonic() + _LAST_WORDS, None
        for rank, (process, connection) in enumerate(zip(self._processes, self._connections, strict=True), 1):
            said: Any = None
            try:
                # What precedes it are answers that nobody waited for.
                while not isinstance(said, Failure) and connection.poll(max(0.0, end - time.monotonic())):
                    said = connection.recv()
            except (EOFError, OSError):
                with suppress(subprocess.TimeoutExpired):
                    # A killed process closes its connection some time before its end.
                    process.wait(max(0.0, end - time.monotonic()))
            if isinstance(said, Failure):
                failed = failed or f"rank {rank} of {self.size} failed: {said.reason}"
        for rank, process in enumerate(self._processes, 1):
            # A rank whose neighbour is gone fails too; the neighbour's end is the reason.
            if code := process.poll():
                return f"rank {rank} of {self.size} has ended with exit code {code}"
        return failed

    def kill(self) -> None:
        """End all at once."""
        for process in self._processes:
            process.kill()
        self._close()

    def shutdown(self) -> None:
        """Let all end, and kill those that do not."""
        self._error = self._error or ExecutorDeadError("the ranks were shut down")
        self._close()
        for process in self._processes:
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


def _line(error: BaseException) -> str:
    """Return the first line of an error, without the place in gloo's source where it begins."""
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^\[\S*\] ", "", line)[:200]
