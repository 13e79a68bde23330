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


class LayerSave(NamedTuple):
    """A block whose target's part is copied to host memory during the pass that completes it, layer by layer.

    Attributes:
        block: of the device.
        host_block: of host memory. It has no name there before the step has published the block.
    """

    block: int
    host_block: int


class Save(NamedTuple):
    """Parts of a block that go from the device to host memory, which holds the block until it is `Saved`.

    Attributes:
        block: of the device.
        host_block: of host memory.
        parts: those that host memory lacked before the step.
        is_begun: whether the target's part was copied during the pass, by a `LayerSave`.
        is_written: whether the parts go on to the stores.
    """

    block: int
    host_block: int
    block_hash: bytes
    parts: frozenset[str]
    is_begun: bool
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
        # Host blocks that the running step fills, by the device's block and the hash that it is to be published with.
        self._begun: dict[tuple[int, bytes], int] = {}
        # Blocks on the device whose features are zeros, and blocks that will be published as they were loaded.
        self._featureless: set[bytes] = set()
        self._loaded: set[bytes] = set()

    def begin(self, upcoming: Iterable[PublishedBlock]) -> list[LayerSave]:
        """Return which of the blocks that the coming step completes are copied during its pass; none if one has failed.

        What the last step has begun and not published is given up.
        """
        self._give_up(self._begun.values())
        self._begun = {}
        hashes: set[bytes] = set()
        for block, block_hash, *_ in upcoming:
            if self._pool.find(block_hash) is None and block_hash not in hashes and self._pool.num_free:
                hashes.add(block_hash)
                (self._begun[block, block_hash],) = self._pool.allocate(1)
        return [LayerSave(block, host_block) for (block, _), host_block in self._begun.items()]

    def save(self, published: Iterable[PublishedBlock]) -> list[Save]:
        """Return what goes to host memory of blocks that a step has published, as far as there is room."""
        saves: list[Save] = []
        begun, self._begun = self._begun, {}
        for block, block_hash, is_new, is_read in published:
            if is_new and block_hash not in self._loaded:
                self._featureless.discard(block_hash)
            if is_new:
                self._loaded.discard(block_hash)
            wanted = self._names if is_read else self._names - {HEAD}
            if block_hash in self._featureless:
                wanted &= {TARGET}
            saves += self._save(block, block_hash, wanted, begun.pop((block, block_hash), None))
        # The step has not published these: a row was discarded, or the request aborted.
        self._give_up(begun.values())
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
    def is_writing(self) -> bool:
        """Return whether blocks wait for stores."""
        return bool(self._writing)

    @property
    def writing(self) -> set[int]:
        """Return the blocks of host memory that wait for stores."""
        return set(self._writing)

    def holders(self) -> Iterator[list[int]]:
        """Yield all that hold blocks, for checks of integrity."""
        yield self._saving
        yield self._writing
        yield list(self._begun.values())

    def _give_up(self, blocks: Iterable[int]) -> None:
        self._pool.free(list(blocks))

    def _save(self, block: int, block_hash: bytes, wanted: frozenset[str], begun: int | None) -> list[Save]:
        pool = self._pool
        host_block = pool.find(block_hash)
        if host_block is None:
            if begun is None and not pool.num_free:
                self._notes.warn("host memory has no room for further blocks: all of them are being read or written")
                return []
            host_block = pool.allocate(1)[0] if begun is None else begun
            pool.register(host_block, block_hash)
            parts = self._parts[host_block] = wanted
        else:
            if begun is not None:
                # Another request's block with the same hash was published first.
                self._give_up([begun])
                begun = None
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
        return [Save(block, host_block, block_hash, parts, begun is not None, is_written)]
