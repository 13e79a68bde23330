"""Ranks that torchrun or another launcher has started, on one machine or several.

Rank 0 runs the program. It listens for the others, which find its port, and a key that they must know, in the store of
the launcher. What follows is as secret and as safe as the network between the machines.
"""

import os
import secrets
import signal
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NoReturn, cast

from torch.distributed.rendezvous import rendezvous

from specdec.core.launch import Launch
from specdec.engine.follower import Follower
from specdec.engine.started_ranks import Process, limit_sends
from specdec.models.rank_group import Store

_KEY = "specdec-engine"
# Seconds in which all ranks must be there, and in which one must say who it is.
MEETING_TIMEOUT = 600.0
_GREETING = 10


class LaunchedRanks:
    """Ranks that wait for this one; see `OtherRanks`.

    Args:
        timeout: seconds for a follower to take a message.

    Raises:
        ValueError: they serve another engine, or have served one.
        TimeoutError: some did not come.
    """

    def __init__(self, launch: Launch, timeout: float) -> None:
        self.store = _store(launch)
        if self.store.check([_KEY]):
            raise ValueError("the ranks of a launcher serve one engine only; start them anew for another one")
        key = secrets.token_bytes(32)
        found: dict[int, Connection] = {}
        with socket.create_server(("", 0)) as server:
            self.store.set(_KEY, f"{server.getsockname()[1]} {key.hex()}")
            end = time.monotonic() + MEETING_TIMEOUT
            while len(found) < launch.size - 1:
                server.settimeout(max(0.01, end - time.monotonic()))
                try:
                    accepted, _ = server.accept()
                except TimeoutError:
                    lacking = ", ".join(str(rank) for rank in range(1, launch.size) if rank not in found)
                    raise TimeoutError(f"of {launch.size} ranks, {lacking} did not come") from None
                self.host = accepted.getsockname()[0]
                limit_sends(accepted, timeout)
                with suppress(AuthenticationError, OSError, EOFError):
                    connection = _greeted(accepted, key)
                    found[connection.recv()] = connection
        self.connections = [found[rank] for rank in range(1, launch.size)]
        self.processes: list[Process] = [_Elsewhere()] * len(found)

    def close(self) -> None:
        """Do nothing: the store is the launcher's."""


class _Elsewhere:
    """A process of the launcher. It ends with its connection, and nothing else is known of it."""

    def poll(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
        return 0

    def kill(self) -> None: ...


def follow(launch: Launch) -> NoReturn:
    """Be a rank beside the first, to the end of this process."""
    # Ctrl-C in a terminal is for the first rank, with which this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    met_follower(launch).run()
    # As in `follower.main`.
    os._exit(0)


def met_follower(launch: Launch) -> Follower:
    """Return the follower of this rank, once rank 0 is there."""
    store = _store(launch)
    port, key = store.get(_KEY).decode().split()
    connected = socket.create_connection((launch.address, int(port)), MEETING_TIMEOUT)
    host = connected.getsockname()[0]
    connected.settimeout(None)
    connection = Connection(connected.detach())
    answer_challenge(connection, bytes.fromhex(key))
    deliver_challenge(connection, bytes.fromhex(key))
    connection.send(launch.rank)
    return Follower(connection, store, host)


def _greeted(accepted: socket.socket, key: bytes) -> Connection:
    """Return the connection to a rank, once it has shown that it knows the key."""
    with accepted:
        accepted.settimeout(None)
        # Whoever says nothing must not keep the ranks waiting.
        _limit_receives(accepted, _GREETING)
        connection = Connection(os.dup(accepted.fileno()))
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        _limit_receives(accepted, 0)
        return connection


def _limit_receives(connection: socket.socket, seconds: int) -> None:
    """Let receives fail after so many seconds; 0 for no limit."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _store(launch: Launch) -> Store:
    """Return the launcher's store, or one that rank 0 offers at MASTER_PORT."""
    limit = timedelta(seconds=MEETING_TIMEOUT)
    found = cast(Any, rendezvous)("env://", launch.rank, launch.size, timeout=limit)
    store, _, _ = next(found)
    store.set_timeout(limit)
    return store
