"""Which blocks each request holds: allocated, shared, copied on write, found by their prefix, swapped. Pure Python."""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from specdec.cache.block_pool import BlockPool, extend_hashes
from specdec.core.request import Request


class MoveKind(Enum):
    """Between which memories."""

    COPY = "copy"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"


class BlockMove(NamedTuple):
    """One block's content, target's, head's and features, goes from `source` to `target`.

    Attributes:
        source: a block of the host's memory for `SWAP_IN`, else of the device's.
        target: a block of the host's memory for `SWAP_OUT`, else of the device's.
    """

    kind: MoveKind
    source: int
    target: int


class Prefix(NamedTuple):
    """The beginning of a request, found in the cache.

    Attributes:
        blocks: that hold it, the last perhaps in part.
        num_tokens: of the request that need not be computed.
        num_draft_cached: of those, tokens that the draft head has read too.
    """

    blocks: list[int]
    num_tokens: int
    num_draft_cached: int


class KVCacheManager:
    """Block tables of requests over one `BlockPool`, and over another of host memory for those swapped out.

    A block that others hold or can find is never written: its holder gets a copy first. Only verified tokens whose
    keys and values are in place are made findable. Movements of content are queued in `moves`, to be carried out in
    this order before the next forward pass.

    Args:
        num_blocks: blocks of the cache.
        block_size: entries of each.
        num_host_blocks: blocks of host memory to swap to.
        enable_prefix_caching: whether requests find each other's blocks.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int = 0, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.host = BlockPool(num_host_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.moves: list[BlockMove] = []

    def blocks_for(self, num_entries: int) -> int:
        return -(-num_entries // self.block_size)

    def take_moves(self) -> list[BlockMove]:
        """Hand over the queued moves, which the caller applies before the next forward pass."""
        moves, self.moves = self.moves, []
        return moves

    def find_prefix(self, request: Request) -> Prefix:
        """What of the request's known tokens lies in the cache, all but the last at most.

        A sample of the same prompt that has computed it gives the most, a partly filled last block included.
        """
        size, most = self.block_size, len(request.token_ids) - 1
        if request.params.prompt_logprobs is not None:
            # Cached tokens yield no logits to score the prompt by.
            return Prefix([], 0, 0)
        if request.num_output == 0 and most > 0:
            for sample in request.cached_samples:
                if sample.num_cached >= most:
                    shared = sample.block_table[: self.blocks_for(most)]
                    return Prefix(shared, most, min(sample.num_draft_cached, most))
        if not self.enable_prefix_caching:
            return Prefix([], 0, 0)
        extend_hashes(request.block_hashes, request.token_ids, size, request.cache_salt)
        blocks: list[int] = []
        num_draft_cached = 0
        for block_hash in request.block_hashes:
            block = self.pool.find(block_hash)
            if block is None:
                break
            if num_draft_cached == len(blocks) * size and self.pool.is_read(block):
                num_draft_cached += size
            blocks.append(block)
        num_tokens = min(len(blocks) * size, most)
        return Prefix(blocks[: self.blocks_for(num_tokens)], num_tokens, min(num_draft_cached, num_tokens))

    def hash_blocks(self, request: Request) -> None:
        """Find the hashes by which the request's prefix will be looked up, before they are asked for."""
        if self.enable_prefix_caching:
            extend_hashes(request.block_hashes, request.token_ids, self.block_size, request.cache_salt)

    def is_being_prefilled(self, request: Request, prefix: Prefix, running: Iterable[Request]) -> bool:
        """Whether one of `running` is computing what comes after the prefix, so that it is worth waiting for."""
        if request.params.prompt_logprobs is not None or prefix.num_tokens == len(request.token_ids) - 1:
            return False
        place = len(prefix.blocks)
        wanted = request.block_hashes[place] if place < len(request.block_hashes) else None
        for other in running:
            if other.num_uncached_tokens > 1:
                # What it has computed and cannot be found has no name and gets none.
                hashes = other.block_hashes if other.num_cached < (place + 1) * self.block_size else []
                if wanted is not None and place < len(hashes) and hashes[place] == wanted:
                    return True
                if other in request.cached_samples and request.num_output == 0 and other.num_cached < other.num_prompt:
                    return True
        return False

    def take_prefix(self, request: Request, prefix: Prefix) -> None:
        """Give a request without blocks the found ones."""
        assert not request.block_table, "the request has blocks"
        self.pool.share(prefix.blocks)
        request.block_table = list(prefix.blocks)
        request.cached_samples[request] = None
        request.num_cached, request.num_draft_cached = prefix.num_tokens, prefix.num_draft_cached

    def fork(self, parent: Request, child: Request) -> None:
        """Share all that the two have in common with a child that has no blocks.

        The child's tokens begin with the parent's cached ones, or end within them.
        """
        shared = min(parent.num_cached, len(child.token_ids) - 1)
        blocks = parent.block_table[: self.blocks_for(shared)]
        child.block_hashes = parent.block_hashes[: shared // self.block_size]
        self.take_prefix(child, Prefix(blocks, shared, min(parent.num_draft_cached, shared)))

    def reserve(self, request: Request, num_entries: int) -> bool:
        """Let the request write its entries from `num_cached` up to `num_entries`; False if blocks are lacking."""
        table = request.block_table
        place = request.num_cached // self.block_size
        shared = place < len(table) and not self.pool.is_private(table[place])
        lacking = self.blocks_for(num_entries) - len(table)
        if lacking <= 0 and not shared:
            return True
        if self.pool.num_free < max(0, lacking) + shared:
            return False
        if shared:
            (block,) = self.pool.allocate(1)
            if request.num_cached % self.block_size:
                self.moves.append(BlockMove(MoveKind.COPY, table[place], block))
            self.pool.free([table[place]])
            table[place] = block
        if lacking > 0:
            table += self.pool.allocate(lacking)
        return True

    def extend(self, request: Request, num_entries: int) -> int:
        """Blocks for entries up to `num_entries`, as far as there are; the entries there is room for."""
        table = request.block_table
        count = min(self.blocks_for(num_entries) - len(table), self.pool.num_free)
        if count > 0:
            table += self.pool.allocate(count)
        return len(table) * self.block_size

    def trim(self, request: Request) -> None:
        """Take back blocks behind those of the known tokens, which drafts have had."""
        keep = self.blocks_for(len(request.token_ids))
        if len(request.block_table) > keep:
            self.pool.free(reversed(request.block_table[keep:]))
            del request.block_table[keep:]

    def commit(self, request: Request) -> None:
        """Make full blocks of cached tokens findable, and note which of them the draft head has read."""
        size = self.block_size
        full = request.num_cached // size
        if self.enable_prefix_caching and request.num_registered < full:
            extend_hashes(request.block_hashes, request.token_ids, size, request.cache_salt)
            for place in range(request.num_registered, full):
                self.pool.register(request.block_table[place], request.block_hashes[place])
            request.num_registered = full
        while (request.num_marked + 1) * size <= request.num_draft_cached:
            self.pool.mark_read(request.block_table[request.num_marked])
            request.num_marked += 1

    def catch_up(self, request: Request) -> None:
        """Count as read what the draft head has meanwhile read for others that hold the same blocks."""
        size = self.block_size
        while request.num_draft_cached % size == 0 and request.num_draft_cached + size <= request.num_cached:
            if not self.pool.is_read(request.block_table[request.num_draft_cached // size]):
                break
            request.num_draft_cached += size

    def release(self, request: Request) -> None:
        """Take back all that a request holds, wherever it lies. What is findable stays so until it is reused."""
        self.pool.free(reversed(request.block_table))
        self.host.free(request.host_blocks)
        request.block_table, request.host_blocks = [], []
        request.cached_samples.pop(request, None)
        request.num_cached = request.num_draft_cached = request.num_registered = request.num_marked = 0

    def swap_out(self, request: Request) -> bool:
        """Move the request's blocks to host memory; False if that is too small."""
        count = self.blocks_for(request.num_cached)
        if count > self.host.num_free:
            return False
        request.host_blocks = self.host.allocate(count)
        for source, target in zip(request.block_table[:count], request.host_blocks, strict=True):
            self.moves.append(BlockMove(MoveKind.SWAP_OUT, source, target))
        self.pool.free(reversed(request.block_table))
        request.block_table = []
        request.cached_samples.pop(request, None)
        request.num_registered = request.num_marked = 0
        return True

    def swap_in(self, request: Request) -> None:
        """The inverse; the caller has checked that there are blocks."""
        request.block_table = self.pool.allocate(len(request.host_blocks))
        request.cached_samples[request] = None
        for source, target in zip(request.host_blocks, request.block_table, strict=True):
            self.moves.append(BlockMove(MoveKind.SWAP_IN, source, target))
        self.host.free(request.host_blocks)
        request.host_blocks = []

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Counts, free lists, hashes and block tables agree, if `requests` are all there are.

        Raises:
            AssertionError: what does not.
        """
        alive = list(requests)
        self.pool.check_integrity(request.block_table for request in alive)
        self.host.check_integrity(request.host_blocks for request in alive)
        for request in alive:
            assert not (request.block_table and request.host_blocks), "a request lies in both memories"
            assert request in request.cached_samples or not request.block_table, "a sample's blocks are not known of"
            assert not any(sample.host_blocks for sample in request.cached_samples), "a sample's blocks are elsewhere"
            held = len(request.block_table) or len(request.host_blocks)
            assert request.num_cached <= held * self.block_size, "more is cached than there are entries"
            assert request.num_draft_cached <= request.num_cached <= len(request.token_ids), "counters out of order"
            hashes: list[bytes] = []
            extend_hashes(hashes, request.token_ids, self.block_size, request.cache_salt)
            assert request.block_hashes == hashes[: len(request.block_hashes)], "a hash is of other tokens"
            for place, block in enumerate(request.block_table):
                name = self.pool.hash_of(block)
                # Of the block in which its cached tokens end it may use a part that is the same.
                if name is not None and request.num_cached // self.block_size != place:
                    assert hashes[place : place + 1] == [name], "a block is named for what it does not hold"
