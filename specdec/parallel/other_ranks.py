"""All ranks but the first, which meets them through a store that all can reach.

The first rank listens for the others, which find its port, and a key that they must know, in the store. The store is a
file of this user, or it is on the network of a launcher or of Ray: what follows is then as secret and as safe as that.
"""

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Protocol

from specdec.parallel.rank_group import LOOPBACK, Store
from specdec.parallel.ranks import OtherRank, RankDeadError

_KEY = "specdec-engine"
# Seconds in which all ranks must be there, in which one must say who it is, and after which their processes are looked
# at.
MEETING_TIMEOUT = 600.0
_GREETING, _LOOK = 10, 1.0


class Process(Protocol):
    """A rank's process; `subprocess.Popen` is one."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class OtherRanks:
    """Processes of all ranks but the first, which end with their connections, and these with this process.

    Args:
        store: through which the ranks find each other.
        processes: one each, in the order of ranks.
        timeout: seconds for a rank to take a message.
        close: gives up what the ranks found each other by.
        address: where the first rank listens; every address of this machine if empty.

    Attributes:
        processes, connections: one each, in the order of ranks.
        host: address of this machine that they reach.

    Raises:
        ValueError: the ranks serve another engine, or have served one.
        TimeoutError: some did not come.
        RankDeadError: a process has ended.
    """

    def __init__(
        self,
        store: Store,
        processes: list[Process],
        timeout: float,
        close: Callable[[], object] = lambda: None,
        address: str = "",
    ) -> None:
        self.store, self.processes, self.close = store, processes, close
        self.host = LOOPBACK
        try:
            self.connections = self._met(timeout, address)
        except BaseException:
            for process in processes:
                process.kill()
            close()
            raise

    def _met(self, timeout: float, address: str) -> list[Connection]:
        """Return the connections to the other ranks, once all are there."""
        if self.store.check([_KEY]):
            raise ValueError("the ranks of a launcher serve one engine only; start them anew for another one")
        key = secrets.token_bytes(32)
        found: dict[int, Connection] = {}
        with socket.create_server((address, 0)) as server:
            self.store.set(_KEY, f"{server.getsockname()[1]} {key.hex()}")
            server.settimeout(_LOOK)
            end = time.monotonic() + MEETING_TIMEOUT
            while lacking := [rank for rank in range(1, len(self.processes) + 1) if rank not in found]:
                try:
                    accepted, _ = server.accept()
                except TimeoutError:
                    self._check(lacking, end)
                    continue
                self.host = accepted.getsockname()[0]
                limit_sends(accepted, timeout)
                with suppress(AuthenticationError, OSError, EOFError):
                    connection = _greeted(accepted, key)
                    found[connection.recv()] = connection
        return [found[rank] for rank in sorted(found)]

    def _check(self, lacking: list[int], end: float) -> None:
        """Check that ranks may still come, until `end`."""
        size = len(self.processes) + 1
        for rank in lacking:
            if (code := self.processes[rank - 1].poll()) is not None:
                raise RankDeadError(f"rank {rank} of {size} has ended with exit code {code} before it was there")
        if time.monotonic() > end:
            raise TimeoutError(f"of {size} ranks, {', '.join(map(str, lacking))} did not come")


def meet(store: Store, rank: int, address: str) -> OtherRank:
    """Return a rank beside the first, once that is there.

    Args:
        address: of the machine of rank 0.
    """
    port, key = store.get(_KEY).decode().split()
    connected = socket.create_connection((address, int(port)), MEETING_TIMEOUT)
    host = connected.getsockname()[0]
    connected.settimeout(None)
    connection = Connection(connected.detach())
    answer_challenge(connection, bytes.fromhex(key))
    deliver_challenge(connection, bytes.fromhex(key))
    connection.send(rank)
    return OtherRank(connection, store, rank, host)


def limit_sends(connection: socket.socket, timeout: float) -> None:
    """Make sends fail after `timeout` seconds, so that a rank that takes no messages, such as a stopped one, blocks
    no step.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout), 0))


def _greeted(accepted: socket.socket, key: bytes) -> Connection:
    """Return the connection to a rank, once it has shown that it knows the key."""
    with accepted:
        accepted.settimeout(None)
        # A peer that sends nothing must not keep the ranks waiting.
        _limit_receives(accepted, _GREETING)
        connection = Connection(os.dup(accepted.fileno()))
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        _limit_receives(accepted, 0)
        return connection


def _limit_receives(connection: socket.socket, seconds: int) -> None:
    """Make receives fail after this many seconds; 0 for no limit."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
