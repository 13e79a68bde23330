"""Block tables of requests: allocation, sharing, copy on write, prefix search. Pure Python."""

import sys
from collections.abc import Iterable, Sequence

from specdec.cache.block_moves import BlockMove, BlockSource, PublishedBlock
from specdec.cache.block_pool import BlockPool, extend_hashes
from specdec.cache.kept_entries import KEEPS_ALL, BlockBounds, KeptEntries
from specdec.cache.prefix_search import Prefix, PrefixSearch
from specdec.core.request import Request
from specdec.kernels.types.block_table import BlockTable


class KVCacheManager:
    """Block tables of requests, over one `BlockPool`.

    A block that other requests hold or can find is never written: its holder gets a copy first. Only verified tokens
    whose keys and values are in place are published to the prefix cache. Copies of blocks are queued in `moves`, to be
    applied in this order before the next forward pass.

    Where all layers have sliding windows, blocks that have slid out are given back, as vLLM does it: a request's table
    then begins with null blocks. Like others, they can be found by their hash until they are reused, and a prefix is
    cached if the blocks of its last tokens are.

    Args:
        block_size: entries of a block.
        enable_prefix_caching: whether requests share the blocks of equal prefixes.
        kept: how far back later rows read.
        step_tokens: most tokens of a step.

    Attributes:
        null_block: stands in block tables for blocks that were given back; the cache's null block.
        bounds: of the blocks that a request holds.
        prefixes: what is cached of requests.
        reports_published: whether `take_published` is called after each step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        kept: KeptEntries = KEEPS_ALL,
        step_tokens: int = sys.maxsize,
    ) -> None:
        self.kept, self.null_block = kept, num_blocks
        self.bounds = BlockBounds(num_blocks, block_size, kept.window, step_tokens)
        self.pool = BlockPool(num_blocks)
        self.prefixes = PrefixSearch(self.pool, block_size, kept, self.null_block)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.moves: list[BlockMove] = []
        self.reports_published = False
        # By block: its hash, and whether it was published rather than read.
        self._published: dict[int, tuple[bytes, bool]] = {}

    def blocks_for(self, num_entries: int) -> int:
        """Return how many blocks hold this many entries."""
        # `ceil_div` written out: this runs for each row of each step.
        return -(-num_entries // self.block_size)

    def take_moves(self) -> list[BlockMove]:
        """Hand over the queued moves, which the caller applies before the next forward pass."""
        moves, self.moves = self.moves, []
        return moves

    def take_published(self) -> list[PublishedBlock]:
        """Hand over the blocks that were published or read since the last call. They keep their content until the next
        allocation.
        """
        published, self._published = self._published, {}
        return [PublishedBlock(block, *rest, self.pool.is_read(block)) for block, rest in published.items()]

    def find_prefix(self, request: Request) -> Prefix:
        """Return the cached beginning of the request's known tokens, at most all but the last.

        A sample of the same prompt that has computed it shares even its partly filled last block.
        """
        size, most = self.block_size, len(request.token_ids) - 1
        if request.params.prompt_logprobs is not None:
            # Cached tokens yield no logits to score the prompt by.
            return Prefix([], 0, 0)
        if request.num_output == 0 and most > 0:
            for sample in request.cached_samples:
                if sample.num_cached >= most and sample.num_slid <= self.kept.num_slid(most, size):
                    return self.prefixes.shared(sample, most)
        if not self.enable_prefix_caching:
            return Prefix([], 0, 0)
        self.hash_blocks(request)
        return self.prefixes.find(request.block_hashes, most)

    def hash_blocks(self, request: Request) -> None:
        """Hash the request's full blocks ahead of its prefix search."""
        if self.enable_prefix_caching:
            extend_hashes(request.block_hashes, request.token_ids, self.block_size, request.cache_salt)

    def is_being_prefilled(self, request: Request, prefix: Prefix, running: Iterable[Request]) -> bool:
        """Return whether one of `running` is computing the tokens behind the prefix, so that waiting gains more."""
        if request.params.prompt_logprobs is not None or prefix.num_tokens == len(request.token_ids) - 1:
            return False
        place = len(prefix.blocks)
        wanted = request.block_hashes[place] if place < len(request.block_hashes) else None
        for other in running:
            if other.num_uncached_tokens > 1:
                # A block that it has computed already and that was not found is not published later.
                hashes = other.block_hashes if other.num_cached < (place + 1) * self.block_size else []
                if wanted is not None and place < len(hashes) and hashes[place] == wanted:
                    return True
                if other in request.cached_samples and request.num_output == 0 and other.num_cached < other.num_prompt:
                    return True
        return False

    def take_prefix(self, request: Request, prefix: Prefix) -> None:
        """Give a request without blocks those of the prefix."""
        assert not request.block_table, "the request has blocks"
        self.pool.share(prefix.held)
        request.block_table = BlockTable(prefix.blocks)
        request.cached_samples[request] = None
        request.num_cached, request.num_draft_cached = prefix.num_tokens, prefix.num_draft_cached
        request.draft_start, request.num_slid = prefix.draft_start, prefix.num_slid
        request.num_registered = prefix.num_slid
        request.num_marked = self.blocks_for(prefix.draft_start)

    def load(self, request: Request, blocks: Sequence[int], sources: Sequence[BlockSource], num_tokens: int) -> None:
        """Append blocks that a connector fills to those of an admitted prefix, which ends with a whole block.

        Args:
            blocks: allocated for the request.
            num_tokens: tokens in these blocks that count as cached; the last block may be used in part.
        """
        end = request.num_cached + num_tokens
        assert len(blocks) == len(sources) == self.blocks_for(end) - len(request.block_table), "one source per block"
        for block, (source, is_read) in zip(blocks, sources, strict=True):
            self.moves.append(BlockMove(source, block, is_load=True))
            if is_read:
                self.pool.mark_read(block)
        request.block_table += blocks
        request.num_cached = end
        self.catch_up(request)
        # A block that is used in part has its entries too.
        is_last = request.num_draft_cached == (len(request.block_table) - 1) * self.block_size
        if is_last and self.pool.is_read(blocks[-1]):
            request.num_draft_cached = end

    def fork(self, parent: Request, child: Request) -> None:
        """Share the parent's blocks with a child that has none.

        The child's tokens begin with the parent's cached ones, or end within them.
        """
        shared = min(parent.num_cached, len(child.token_ids) - 1)
        assert parent.num_slid <= self.kept.num_slid(shared, self.block_size), "the child's last tokens were given back"
        child.block_hashes = parent.block_hashes[: shared // self.block_size]
        self.take_prefix(child, self.prefixes.shared(parent, shared))

    def reserve(self, request: Request, num_entries: int) -> bool:
        """Make the entries from `num_cached` to `num_entries` writable; False, with no effect, if blocks lack."""
        table = request.block_table
        place = request.num_cached // self.block_size
        shared = place < len(table) and not self.pool.is_private(table[place])
        # `blocks_for` written out, here and in `extend`: both run for each row of each step.
        lacking = -(-num_entries // self.block_size) - len(table)
        if lacking <= 0 and not shared:
            return True
        if self.pool.num_free < max(0, lacking) + shared:
            return False
        if shared:
            (block,) = self.pool.allocate(1)
            if request.num_cached % self.block_size:
                self.moves.append(BlockMove(table[place], block))
            self.pool.free([table[place]])
            table[place] = block
        if lacking > 0:
            table += self.pool.allocate(lacking)
        return True

    def extend(self, request: Request, num_entries: int) -> int:
        """Allocate blocks for `num_entries` entries as far as any are free; return how many entries the table has."""
        table = request.block_table
        count = -(-num_entries // self.block_size) - len(table)
        if count > 0:
            table += self.pool.allocate(min(count, self.pool.num_free))
        return len(table) * self.block_size

    def trim(self, request: Request) -> None:
        """Free the blocks behind the known tokens, that only drafts use, not those that choices need."""
        keep = self.blocks_for(len(request.token_ids) + request.least_nodes)
        if len(request.block_table) > keep:
            self.pool.free(reversed(request.block_table[keep:]))
            del request.block_table[keep:]

    def commit(self, request: Request) -> None:
        """Publish full blocks of cached tokens, mark those that the draft head has read, give back what slid out."""
        size = self.block_size
        full = request.num_cached // size
        if self.enable_prefix_caching and request.publishes and request.num_registered < full:
            self.hash_blocks(request)
            for place in range(request.num_registered, full):
                block, block_hash = request.block_table[place], request.block_hashes[place]
                if self.pool.register(block, block_hash) and self.reports_published:
                    self._published[block] = block_hash, True
            request.num_registered = full
        while request.publishes and (request.num_marked + 1) * size <= request.num_draft_cached:
            block = request.block_table[request.num_marked]
            if self.reports_published and not self.pool.is_read(block):
                self._published.setdefault(block, (request.block_hashes[request.num_marked], False))
            self.pool.mark_read(block)
            request.num_marked += 1
        if self.kept.head_reach or self.kept.window:
            self.catch_up(request)
            self._slide(request)

    def withdraw(self, request: Request) -> None:
        """Remove the blocks of a request from the prefix cache, since their values are not finite."""
        for block in request.block_table[request.num_slid :]:
            self.pool.withdraw(block)

    def _slide(self, request: Request) -> None:
        """Give back the blocks that no later row reads. What is published can be found until it is reused."""
        count, before = self.kept.num_slid(request.num_cached, self.block_size), request.num_slid
        if count > before:
            table, start = request.block_table, count * self.block_size
            self.pool.free(table[before:count])
            table[before:count] = [self.null_block] * (count - before)
            request.num_slid = count
            request.draft_start = max(request.draft_start, start)
            # Without a head it lies behind.
            request.num_draft_cached = max(request.num_draft_cached, start)
            request.num_marked = max(request.num_marked, count)

    def catch_up(self, request: Request) -> None:
        """Advance `num_draft_cached` over what the draft head need not read.

        These are shared blocks that it has already read for another request, and entries that no later row needs.
        """
        size, reach = self.block_size, self.kept.head_reach
        self._pass_read_blocks(request)
        start = request.num_cached + 1 - reach
        if reach and start > request.num_draft_cached:
            place = start // size
            if place < len(request.block_table) and self.pool.is_read(request.block_table[place]):
                start = place * size
            request.num_draft_cached = request.draft_start = start
            request.num_marked = max(request.num_marked, self.blocks_for(start))
            self._pass_read_blocks(request)

    def _pass_read_blocks(self, request: Request) -> None:
        size = self.block_size
        while request.num_draft_cached % size == 0 and request.num_draft_cached + size <= request.num_cached:
            if not self.pool.is_read(request.block_table[request.num_draft_cached // size]):
                break
            request.num_draft_cached += size

    def release(self, request: Request) -> None:
        """Free all blocks of a request. Published blocks can be found until they are reused."""
        self.pool.free(reversed(request.block_table[request.num_slid :]))
        request.block_table = BlockTable()
        request.cached_samples.pop(request, None)
        request.num_cached = request.num_draft_cached = request.num_registered = request.num_marked = 0
        request.num_slid = request.draft_start = 0
