"""Blocks that move within the cache, and those that a connector loads or is told of.

Pure Python.
"""

from typing import NamedTuple


class BlockMove(NamedTuple):
    """Copy of one block's content: keys and values of target and head, and features.

    Attributes:
        source: a block of the cache, or a connector's own number of one.
        target: a block of the cache.
        is_load: whether a connector loads the content.
    """

    source: int
    target: int
    is_load: bool = False


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
