"""The interface of stores behind host memory, and the record in which they keep a block."""

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

_HEADER = struct.Struct("<8sQ16s")
_MAGIC = b"specdkv1"
HEADER_SIZE = _HEADER.size
# A key that no block has, to see whether a store answers.
NO_KEY = "specdec"


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
