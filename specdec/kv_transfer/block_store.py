"""Stores behind host memory: their interface, the record in which they keep a block, and a guard while one fails."""

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from specdec.kernels.types.settings import one_line
from specdec.kv_transfer.notes import Notes

T = TypeVar("T")
_HEADER = struct.Struct("<8sQ16s")
_MAGIC = b"specdkv1"
HEADER_SIZE = _HEADER.size
# A key that no block has, to see whether a store answers.
NO_KEY = "specdec"
# Seconds between questions whether a store that failed answers again.
RETRY_AFTER = 5.0


class StoreError(Exception):
    """Failure of a store as a whole, such as a server that does not answer. Its message is one line."""


class BlockStore(Protocol):
    """Records by key. All methods may block; they are called by threads of their own.

    A record that is damaged, truncated or of another key counts as absent.

    Attributes:
        name: how messages call it.
    """

    name: str

    def count_held(self, keys: Sequence[str]) -> int:
        """Return how many of the keys are there before the first that is not."""
        ...

    def read(self, keys: Sequence[str], payloads: Sequence[memoryview]) -> list[bool]:
        """Fill the payloads, each of its record's size; return which of them are whole. Others may hold anything."""
        ...

    def write(self, keys: Sequence[str], payloads: Sequence[memoryview]) -> None:
        """Keep the payloads, as far as there is room."""
        ...

    def close(self) -> None:
        """Give up connections. Nothing is called afterwards."""
        ...


class GuardedStore:
    """One direction of a store, reading or writing, that is left alone after a failure until the store answers again.

    Args:
        notes: for failures.
        consequence: of a failure, for its log line.

    Attributes:
        busy: held during calls of the store.
    """

    def __init__(self, store: BlockStore, notes: Notes, consequence: str) -> None:
        self.store, self._notes, self._consequence, self.is_up = store, notes, consequence, True
        self.busy, self._has_ended = threading.Lock(), threading.Event()

    def call(self, default: T, operation: Callable[..., T], *arguments: object) -> T:
        """Return what a store's method returns, or `default` if it fails or has failed."""
        if not self.is_up:
            return default
        try:
            with self.busy:
                return operation(*arguments)
        except Exception as error:
            self.is_up = False
            reason = one_line(error)
            self._notes.warn(
                f"{self.store.name}: {reason}; {self._consequence}", f"{self.store.name} {self._consequence}"
            )
            # By a thread of its own, so that no request ever waits for a store that is known to be gone.
            threading.Thread(target=self._wait_for_answer, name="kv-retry", daemon=True).start()
            return default

    def end(self) -> None:
        """Ask a store that failed no more."""
        self._has_ended.set()

    def _wait_for_answer(self) -> None:
        while not self._has_ended.wait(RETRY_AFTER):
            with suppress(Exception), self.busy:
                self.store.count_held([NO_KEY])
                self.is_up = True
                return


def header_of(key: str, payload: memoryview) -> bytes:
    """Return a record's header: a mark, the payload's size in bytes, and a checksum of key and payload."""
    return _HEADER.pack(_MAGIC, len(payload), _checksum(key, payload))


def flaw_of(key: str, header: bytes | memoryview, payload: memoryview) -> str | None:
    """Return what is wrong with a record, None if nothing is."""
    magic, size, checksum = _HEADER.unpack(header)
    if magic != _MAGIC:
        return "not a block of this format"
    if size != len(payload):
        return f"{size} bytes where {len(payload)} are expected"
    return None if checksum == _checksum(key, payload) else "wrong checksum"


def _checksum(key: str, payload: memoryview) -> bytes:
    # Keyed, so that a record under another's name is found out too.
    own = hashlib.blake2b(key.encode(), digest_size=32).digest()
    return hashlib.blake2b(payload, digest_size=16, key=own).digest()
