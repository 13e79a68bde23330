"""The connector over host memory and the stores behind it: disk, shared pools."""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.cache.block_moves import BlockSource, PublishedBlock
from specdec.core.request import Request
from specdec.kv_transfer.block_store import BlockStore
from specdec.kv_transfer.host_blocks import Copied, HostBlocks
from specdec.kv_transfer.host_tier import FEATURES, HostTier
from specdec.kv_transfer.kv_connector import KVCaches, KVConnector
from specdec.kv_transfer.notes import Notes
from specdec.kv_transfer.rank_reads import RankReads, ReadMeta
from specdec.kv_transfer.transfers import TARGET, Result, Save, Saved, Transfers

logger = logging.getLogger(__name__)
# Seconds that `shutdown` waits for blocks that are still to be written.
FLUSH = 10.0


class Finished(NamedTuple):
    """Work that the worker side has finished.

    Attributes:
        results: of reads, writes and copies to host memory.
        num_loaded: blocks that have been copied to the device.
        lines: for the log.
        are_up: whether the stores answer.
    """

    results: list[Result]
    num_loaded: int
    lines: list[str]
    are_up: bool


class OffloadingConnector(KVConnector):
    """Stacked tiers: the device, host memory, and stores such as a disk.

    Published blocks are copied to host memory at the end of the step, and written to every store in the background. A
    request whose prefix is in host memory loads it when it is admitted. What only a store has is fetched to host memory
    first, by a thread, while the request waits without a seat.

    Over several ranks each has host memory with as many blocks, whose numbers mean the same on all of them, and stores
    for its own parts.

    Args:
        num_blocks: blocks of host memory.
        block_size: tokens of a block.
        stores: behind host memory, asked in this order.
        key: returns the key of a part of a block by its hash.
        notes: for failures.
        loads, stores_blocks: whether blocks are loaded, and stored.
        timeout: seconds after which a request no longer waits for its blocks.
    """

    supports_ranks = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        stores: Sequence[BlockStore],
        key: Callable[[str, bytes], str],
        notes: Notes | None = None,
        *,
        loads: bool = True,
        stores_blocks: bool = True,
        timeout: float = 5.0,
    ) -> None:
        self._num_blocks, self._block_size, self._stores, self._key = num_blocks, block_size, stores, key
        self._loads, self._stores_blocks, self._timeout = loads, stores_blocks, timeout
        self._notes = notes or Notes(logger)
        # Of decisions, which all ranks make alike.
        self._own_notes = Notes(logger)
        # Loads, and of how many blocks: those that have begun, and all blocks since the start.
        self._loads_begun: deque[tuple[Copied, int]] = deque()
        self._num_begun = 0
        # Blocks that go to host memory and no further.
        self._saves: deque[tuple[Copied, list[int]]] = deque()
        self._end: Callable[[], object] = lambda: None

    def register_kv_caches(self, caches: KVCaches) -> None:
        self.memory = HostBlocks(self._num_blocks, caches)
        self._sizes = {name: len(self.memory.payload(name, 0)) for name in self.memory.names}
        self.transfers = Transfers(self._stores, self.memory, self._key, self._notes, caches.common_parts)
        self.reads = RankReads(self.transfers.has_stores, caches.num_ranks, caches.num_drafting)
        self._num_loaded = [0] * caches.num_ranks
        sizes = self._num_blocks, self._block_size
        self.tier = HostTier(*sizes, caches.all_parts or self.memory.names, self.reads, self._timeout, self._own_notes)
        # Also where the engine is given up without `shutdown`, or the program ends.
        self._end = weakref.finalize(self, self.transfers.shutdown, FLUSH)

    def begin_step(self, clock: float) -> None:
        self.tier.clock = self.reads.clock = clock
        self._own_notes.flush()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not self._loads:
            return 0, False
        found = self.tier.match(request, num_computed_tokens)
        return found, found is None

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> Sequence[BlockSource]:
        count = -(-num_external_tokens // self._block_size)
        assert count == len(block_ids), "one block per block of tokens"
        return self.tier.take(request, request.num_cached // self._block_size, count)

    def build_read_meta(self) -> ReadMeta | None:
        return self.reads.take()

    def build_connector_meta(self, published: Sequence[PublishedBlock]) -> list[Save]:
        return self.tier.save(published) if self._stores_blocks else []

    def update_connector_output(self, output: Finished, rank: int = 0) -> None:
        for line in output.lines:
            logger.warning("%s%s", f"rank {rank}: " if rank else "", line)
        self.reads.are_up[rank] = output.are_up
        self.tier.update(self.reads.agree(rank, output.results))
        self._num_loaded[rank] += output.num_loaded
        if min(self._num_loaded) == self._num_begun:
            self.tier.loaded()

    def request_finished(self, request: Request) -> None:
        self.tier.forget(request)

    def is_sending(self, request: Request) -> bool:
        return self.tier.is_sending(request)

    def start_read_kv(self, metadata: ReadMeta | None) -> None:
        for part, block in metadata.clears if metadata else ():
            if part in self._sizes:
                self.memory.clear(part, block)
        for read in metadata.reads if metadata else ():
            self.transfers.read(read)

    def start_load_kv(self, sources: Sequence[int], block_ids: Sequence[int]) -> None:
        self._loads_begun.append((self.memory.load(sources, block_ids), len(sources)))
        self._num_begun += len(sources)

    def wait_for_save(self, metadata: list[Save]) -> None:
        for parts in dict.fromkeys(save.parts for save in metadata):
            saves = [save for save in metadata if save.parts == parts]
            # A rank without the draft model has the target's part alone.
            own = parts & self._sizes.keys()
            copied = self.memory.store([save.block for save in saves], [save.host_block for save in saves], own)
            self._saves.append((copied, [save.host_block for save in saves if not save.is_written]))
            for save in saves:
                if TARGET in parts and FEATURES in self._sizes.keys() - parts:
                    # Those of an earlier block would be taken for this one's.
                    self.memory.clear(FEATURES, save.host_block)
                if save.is_written:
                    self.transfers.write(save, copied.wait)

    def get_finished(self) -> Finished:
        results = self.transfers.take_results()
        while self._saves and self._saves[0][0].is_done:
            results += [Saved(block, False) for block in self._saves.popleft()[1]]
        num_loaded = 0
        while self._loads_begun and self._loads_begun[0][0].is_done:
            num_loaded += self._loads_begun.popleft()[1]
        return Finished(results, num_loaded, self._notes.take(), self.transfers.are_up)

    def wait(self, seconds: float) -> None:
        self.transfers.wait(seconds)

    def shutdown(self) -> None:
        # Host memory may be freed next, and the device must not read or write there any more.
        for copied, _ in [*self._loads_begun, *self._saves]:
            copied.wait()
        self._end()
        self._notes.flush()
        self._own_notes.flush()
