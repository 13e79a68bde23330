"""Meeting of the first rank with others that somebody else has started, through a store that all can reach.

The first rank listens for the others, which find its port, and a key that they must know, in the store. What follows
is as secret and as safe as the network between the machines.
"""

import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from specdec.parallel.rank_group import Store
from specdec.parallel.ranks import OtherRank
from specdec.parallel.started_ranks import limit_sends

_KEY = "specdec-engine"
# Seconds in which all ranks must be there, and in which one must say who it is.
MEETING_TIMEOUT = 600.0
_GREETING = 10


class MetRanks:
    """Connections of the first rank to the others; see `OtherRanks`.

    Args:
        store: through which the ranks find each other.
        size: number of all ranks.
        timeout: seconds for a rank to take a message.

    Raises:
        ValueError: the ranks serve another engine, or have served one.
        TimeoutError: some did not come.
    """

    def __init__(self, store: Store, size: int, timeout: float) -> None:
        self.store = store
        if self.store.check([_KEY]):
            raise ValueError("the ranks of a launcher serve one engine only; start them anew for another one")
        key = secrets.token_bytes(32)
        found: dict[int, Connection] = {}
        with socket.create_server(("", 0)) as server:
            self.store.set(_KEY, f"{server.getsockname()[1]} {key.hex()}")
            end = time.monotonic() + MEETING_TIMEOUT
            while len(found) < size - 1:
                server.settimeout(max(0.01, end - time.monotonic()))
                try:
                    accepted, _ = server.accept()
                except TimeoutError:
                    lacking = ", ".join(str(rank) for rank in range(1, size) if rank not in found)
                    raise TimeoutError(f"of {size} ranks, {lacking} did not come") from None
                self.host = accepted.getsockname()[0]
                limit_sends(accepted, timeout)
                with suppress(AuthenticationError, OSError, EOFError):
                    connection = _greeted(accepted, key)
                    found[connection.recv()] = connection
        self.connections = [found[rank] for rank in range(1, size)]

    def close(self) -> None:
        """Do nothing: the store ends with the ranks."""


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
