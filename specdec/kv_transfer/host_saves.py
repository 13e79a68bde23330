"""Blocks on their way from the device to host memory, and on to the stores behind it. Pure Python."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from specdec.cache.block_moves import PublishedBlock
from specdec.cache.block_pool import BlockPool
from specdec.kv_transfer.notes import Notes
from specdec.kv_transfer.transfers import TARGET, Saved

FEATURES, HEAD = "features", "head"
# Blocks that are remembered as loaded without features.
MOST_MARKS = 1 << 16


class Save(NamedTuple):
    """Parts of a block that go from the device to host memory, which holds the block until it is `Saved`.

    Attributes:
        block: of the device.
        host_block: of host memory.
        parts: those that host memory lacked before the step.
        is_written: whether the parts go on to the stores.
    """

    block: int
    host_block: int
    block_hash: bytes
    parts: frozenset[str]
    is_written: bool


class HostSaves:
    """The side of `HostTier` that takes blocks from the device.

    Args:
        pool: blocks of host memory.
        parts: by block of host memory, the parts that it has or will have when the step ends.
        names: of all parts of the cache.
        has_stores: whether there are stores behind host memory.
        notes: for blocks that find no room.
    """

    def __init__(
        self, pool: BlockPool, parts: list[frozenset[str]], names: frozenset[str], has_stores: bool, notes: Notes
    ) -> None:
        self._pool, self._parts, self._names, self._notes = pool, parts, names, notes
        self._has_stores = has_stores
        # Being copied from the device, to stay in host memory and to go on to the stores.
        self._saving: list[int] = []
        self._writing: list[int] = []
        # Blocks on the device whose features are zeros, and blocks that will be published as they were loaded.
        self._featureless: set[bytes] = set()
        self._loaded: set[bytes] = set()

    def save(self, published: Iterable[PublishedBlock]) -> list[Save]:
        """Return what goes to host memory of blocks that a step has published, as far as there is room."""
        saves: list[Save] = []
        for block, block_hash, is_new, is_read in published:
            if is_new and block_hash not in self._loaded:
                self._featureless.discard(block_hash)
            if is_new:
                self._loaded.discard(block_hash)
            wanted = self._names if is_read else self._names - {HEAD}
            if block_hash in self._featureless:
                wanted &= {TARGET}
            saves += self._save(block, block_hash, wanted)
        return saves

    def saved(self, result: Saved) -> None:
        """Release a block that has its content, and was written if it was to be."""
        (self._writing if result.is_written else self._saving).remove(result.block)
        self._pool.free([result.block])

    def note_load(self, block_hash: bytes, parts: frozenset[str]) -> None:
        """Remember that the device will have a block as it was loaded, with these parts."""
        self._loaded.add(block_hash)
        if not parts >= self._names - {HEAD}:
            self._featureless.add(block_hash)

    def bound_marks(self) -> None:
        """Forget which blocks were loaded, if they are many. Zeros may then be stored as features, which costs
        acceptance and no more.
        """
        if len(self._featureless) + len(self._loaded) > MOST_MARKS:
            self._featureless.clear()
            self._loaded.clear()

    @property
    def writing(self) -> set[int]:
        """Return the blocks of host memory that wait for stores."""
        return set(self._writing)

    def holders(self) -> Iterator[list[int]]:
        """Yield all that hold blocks, for checks of integrity."""
        yield self._saving
        yield self._writing

    def _save(self, block: int, block_hash: bytes, wanted: frozenset[str]) -> list[Save]:
        pool = self._pool
        host_block = pool.find(block_hash)
        if host_block is None:
            if not pool.num_free:
                self._notes.warn("host memory has no room for further blocks: all of them are being read or written")
                return []
            (host_block,) = pool.allocate(1)
            pool.register(host_block, block_hash)
            parts = self._parts[host_block] = wanted
        else:
            parts = wanted - self._parts[host_block]
            if not parts:
                return []
            pool.share([host_block])
            self._parts[host_block] |= parts
        # What waits to be written must leave room for what is to be loaded.
        is_written = self._has_stores and len(self._writing) < pool.num_blocks // 2
        if self._has_stores and not is_written:
            self._notes.warn("stores write more slowly than blocks are computed: some stay in host memory alone")
        (self._writing if is_written else self._saving).append(host_block)
        return [Save(block, host_block, block_hash, parts, is_written)]
