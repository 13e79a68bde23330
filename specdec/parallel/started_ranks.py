"""Processes of the ranks beside the first, started by it on this machine."""

import os
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from specdec.parallel.rank_group import LOOPBACK, Store, file_store

# Module of a rank's process. By name, as it builds the engine, which is above this room.
RANK_PROCESS = "specdec.building.rank_process"


class Process(Protocol):
    """A rank's process; `subprocess.Popen` is one."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class OtherRanks(Protocol):
    """Processes of all ranks but the first, and what leads to them.

    Attributes:
        processes, connections: one each, in the order of ranks.
        store: through which the ranks find each other.
        host: address of this machine that they reach.
    """

    processes: list[Process]
    connections: list[Connection]
    store: Store
    host: str

    def close(self) -> None:
        """Give up what the ranks found each other by. The processes end with their connections."""
        ...


class StartedRanks:
    """Processes on this machine. They end with their connections, and these with this process; see `OtherRanks`.

    Args:
        size: number of all ranks.
        timeout: seconds for a rank to take a message.
    """

    host = LOOPBACK

    def __init__(self, size: int, timeout: float) -> None:
        self._folder = TemporaryDirectory(prefix="specdec-ranks-")
        file = str(Path(self._folder.name) / "store")
        self.store = file_store(file)
        self.processes: list[Process] = []
        self.connections: list[Connection] = []
        for rank in range(1, size):
            own, other = socket.socketpair()
            limit_sends(own, timeout)
            with other:
                self.processes.append(launched(other.fileno(), file, rank))
            self.connections.append(Connection(own.detach()))

    def close(self) -> None:
        """See `OtherRanks.close`."""
        self._folder.cleanup()


def launched(descriptor: int, store: str, rank: int) -> Process:
    """Start a rank that inherits a socket. Ctrl-C in a terminal reaches the first rank alone.

    Args:
        store: file through which the ranks find each other.
    """
    modules = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", RANK_PROCESS, str(descriptor), store, str(rank)],
        stdin=subprocess.DEVNULL,
        # Standard output is the program's own.
        stdout=2,
        env={**os.environ, "PYTHONPATH": modules},
        pass_fds=(descriptor,),
        start_new_session=True,
    )


def limit_sends(connection: socket.socket, timeout: float) -> None:
    """Make sends fail after `timeout` seconds, so that a rank that takes no messages, such as a stopped one, blocks
    no step.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout), 0))
