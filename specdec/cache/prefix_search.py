"""Search for the cached beginning of a request. Pure Python."""

from collections.abc import Sequence
from typing import NamedTuple

from specdec.cache.block_pool import BlockPool
from specdec.cache.kept_entries import KeptEntries
from specdec.core.request import Request
from specdec.kernels.types.integers import ceil_div


class Prefix(NamedTuple):
    """Cached beginning of a request.

    Attributes:
        blocks: blocks that hold it, the last one perhaps in part; first null blocks for those that no row reads.
        num_tokens: its length.
        num_draft_cached: end of the part that the draft head's cache covers.
        num_slid: number of null blocks.
        draft_start: beginning of that part.
    """

    blocks: list[int]
    num_tokens: int
    num_draft_cached: int
    num_slid: int = 0
    draft_start: int = 0

    @property
    def held(self) -> list[int]:
        """The blocks without null blocks."""
        return self.blocks[self.num_slid :]


class PrefixSearch:
    """Search for cached prefixes by the hashes of their blocks, or in other requests' block tables.

    Where rows see no further back than a window, only the blocks of a prefix's last tokens need be there.
    """

    def __init__(self, pool: BlockPool, block_size: int, kept: KeptEntries, null_block: int) -> None:
        self._pool, self._block_size, self._kept, self._null_block = pool, block_size, kept, null_block

    def find(self, hashes: Sequence[bytes], most: int) -> Prefix:
        """Return the longest cached prefix of a request.

        Args:
            hashes: of its full blocks.
            most: limit of the prefix's tokens.
        """
        size, blocks = self._block_size, self._find_blocks(hashes)
        num_tokens = min(len(blocks) * size, most)
        num_slid = self._kept.num_slid(num_tokens, size)
        read = num_slid
        while read < len(blocks) and self._pool.is_read(blocks[read]):
            read += 1
        blocks = [*[self._null_block] * num_slid, *blocks[num_slid : ceil_div(num_tokens, size)]]
        return Prefix(blocks, num_tokens, min(read * size, num_tokens), num_slid, num_slid * size)

    def _find_blocks(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix; those that no row behind it reads may be null blocks."""
        blocks: list[int] = []
        # Length of the prefix, and where the blocks begin that are found without a gap.
        end, begin, window = 0, 0, self._kept.window
        for place, block_hash in enumerate(hashes):
            block = self._pool.find(block_hash)
            if block is None:
                if not window:
                    break
                block, begin = self._null_block, place + 1
            elif begin == 0 or (place + 1 - begin) * self._block_size >= window:
                end = place + 1
            blocks.append(block)
        return blocks[:end]

    def shared(self, other: Request, num_tokens: int) -> Prefix:
        """Return what a request has in common with another that has cached this many of its tokens."""
        blocks, num_slid = other.block_table[: ceil_div(num_tokens, self._block_size)], other.num_slid
        start, read = other.draft_start, min(other.num_draft_cached, num_tokens)
        if start > max(0, num_tokens + 1 - self._kept.head_reach):
            # The other's head has passed over entries that are not behind this one.
            start = read = num_slid * self._block_size
        return Prefix(blocks, num_tokens, read, num_slid, start)

    def whole_blocks(self, prefix: Prefix) -> Prefix:
        """Return the prefix without its last, partly used block.

        Rows behind the shorter prefix may read blocks that were given back; then the empty prefix is returned.
        """
        count = prefix.num_tokens // self._block_size
        num_tokens = count * self._block_size
        if prefix.num_slid > self._kept.num_slid(num_tokens, self._block_size):
            return Prefix([], 0, 0)
        read = min(prefix.num_draft_cached, num_tokens)
        if prefix.draft_start > read:
            read = prefix.num_slid * self._block_size
        return Prefix(prefix.blocks[:count], num_tokens, read, prefix.num_slid, min(prefix.draft_start, read))

    def without_slid(self, prefix: Prefix, num_loaded: int) -> tuple[Prefix, int]:
        """Return what of a prefix, and of tokens loaded behind it, later rows read: the prefix, and number of tokens.

        Args:
            num_loaded: tokens behind the prefix that a connector can load.
        """
        end, size = prefix.num_tokens + num_loaded, self._block_size
        num_slid = self._kept.num_slid(end, size)
        if num_slid <= prefix.num_slid:
            return prefix, num_loaded
        start = num_slid * size
        num_tokens = max(prefix.num_tokens, start)
        rest = Prefix(
            [*[self._null_block] * num_slid, *prefix.blocks[num_slid:]],
            num_tokens,
            max(prefix.num_draft_cached, start),
            num_slid,
            max(prefix.draft_start, start),
        )
        return rest, end - num_tokens
