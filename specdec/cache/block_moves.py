"""Blocks that move within the cache, and those that a connector loads or is told of.

Pure Python.
"""

from enum import Enum
from typing import NamedTuple


class MoveKind(Enum):
    """Source of a block's content: `COPY` from another block of the cache, `LOAD` from a connector."""

    COPY = "copy"
    LOAD = "load"


class BlockMove(NamedTuple):
    """Copy of one block's content: keys and values of target and head, and features.

    Attributes:
        source: a connector's own number for `LOAD`, else a block of the cache.
        target: a block of the cache.
    """

    kind: MoveKind
    source: int
    target: int


class BlockSource(NamedTuple):
    """A block that a connector can load.

    Attributes:
        source: the connector's own number of it.
        is_read: whether the draft head's keys and values come with it.
    """

    source: int
    is_read: bool


class PublishedBlock(NamedTuple):
    """A block that a step has published, or that the draft head has read since.

    Attributes:
        is_new: whether the step has published it.
        is_read: whether the draft head's keys and values of all its entries are written.
    """

    block: int
    block_hash: bytes
    is_new: bool
    is_read: bool
