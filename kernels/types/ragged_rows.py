"""The packed query rows of a step, and the cache slots that each of them sees."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.types.integers import ceil_div

WORD_BITS = 64
# Query rows of one tile of a long chain: bounds the masks and skips keys above the diagonal.
TILE_ROWS = 128
# Least number of keys that are attended under a mask by row. Up to it, one call of the attention kernel is cheaper
# than two and their merging; beyond it, a mask as wide as the context would dominate the cost.
MASKED_KEYS = 512


@dataclass(frozen=True)
class RaggedRows:
    """Query rows of several requests, packed one after another, over a paged cache.

    A request's cache is a sequence of entries `0 .. length - 1`; entry `s` lies in slot
    `block_table[s // block_size] * block_size + s % block_size`. Query row `i` of request `b` sees
    entries `[first, visible[i])` and, of the draft tree whose node 0 is entry `tree_starts[b]`, the
    nodes whose bit is set in `ancestors[i]` (bit j % 64 of word j // 64, its own bit included).
    In a layer with a sliding window of W tokens it sees only the last W of them, itself included: entries from
    `visible[i] + (number of its ancestor bits) - W` on. No tree is deeper than W, so all ancestors are among them.

    A request's rows are its last cache entries, in order: a chain, then tree nodes after their parents. So
    none sees an entry beyond its own, but for the rows of a block (`sees_later`).

    Attributes:
        query_lens: query rows of each request, all positive, host side.
        lengths: cache entries of each request once this step's keys are stored, host side.
        tree_starts: entry of each request's tree node 0; equal to `lengths` where there is no tree.
        block_tables: int64 `[tables, blocks]`; entries beyond a request's blocks are never read.
        visible: int64 `[rows]`.
        ancestors: int64 `[rows, words]`.
        block_size: entries a block.
        first: first entry that any row sees. The EAGLE head's entry 0 does not exist (it would need
            the feature of token -1), so its rows see from entry 1.
        firsts: the same for each request, host side; empty where it is `first` for all. Earlier entries of a request
            may hold nothing.
        sees_later: whether the rows of a request may see each other whatever their order.
        adapters: place of each request's adapter in the bank, 0 for none, host side; empty if no request has one.
        gap: entries before a tree, at most, that its nodes do not see: tokens that the host does not know yet.
        table_rows: the row of `block_tables` of each request, host side; empty where they lie in turn.
    """

    query_lens: Sequence[int]
    lengths: Sequence[int]
    tree_starts: Sequence[int]
    block_tables: Tensor
    visible: Tensor
    ancestors: Tensor
    block_size: int
    first: int = 0
    sees_later: bool = False
    adapters: Sequence[int] = ()
    firsts: Sequence[int] = ()
    gap: int = 0
    table_rows: Sequence[int] = ()

    def table_row(self, request: int) -> int:
        """Return the row of `block_tables` of a request."""
        return self.table_rows[request] if self.table_rows else request

    def row_groups(self, window: int = 0) -> "list[RowGroup]":
        """Return tiles of similar shape, batched, for the plain-torch attention; made once a step.

        Args:
            window: tokens that a row sees, itself included; 0 for all.
        """
        key = "row groups", window
        if key not in self.plans:
            buckets: dict[tuple[int, int], list[Tile]] = {}
            for tile in self.tiles(TILE_ROWS, window):
                size = tile.rows.bit_length(), (max(tile.end - tile.begin, MASKED_KEYS) - 1).bit_length()
                buckets.setdefault(size, []).append(tile)
            self.plans[key] = [RowGroup.build(self, tiles, window) for tiles in buckets.values()]
        groups: list[RowGroup] = self.plans[key]
        return groups

    def tiles(self, most: int, window: int = 0) -> "list[Tile]":
        """Return all query rows in tiles of at most `most`."""
        tiles, start = [], 0
        for request, (count, length) in enumerate(zip(self.query_lens, self.lengths, strict=True)):
            for at in range(0, count, most):
                rows = min(most, count - at)
                entry = length - count + at
                begin = self.firsts[request] if self.firsts else self.first
                if window:
                    begin = max(begin, min(entry, self.tree_starts[request] - self.gap) + 1 - window)
                tiles.append(Tile(request, start + at, rows, begin, length if self.sees_later else entry + rows))
            start += count
        return tiles

    def begins(self, window: int) -> Tensor:
        """Return the first entry that each row sees of the last `window` tokens, int64 `[rows]`; it may be negative."""
        return self.visible + num_bits(self.ancestors).sum(1) - window

    @cached_property
    def plans(self) -> dict[Hashable, Any]:
        """Work plans by what else they depend on; made by the attention kernel once a step."""
        return {}


class Tile(NamedTuple):
    """Consecutive query rows of one request, which see no entry before `begin` and none from `end` on."""

    request: int
    start: int
    rows: int
    begin: int
    end: int


@dataclass(frozen=True)
class RowGroup:
    """Tiles padded to one shape `[tiles, rows]` by `[tiles, keys]`, keys aligned at their right end.

    Aligned so, the entries that not every row sees are the same last columns in all tiles: a mask by row is
    needed for those alone. The keys are attended in two parts, of which only the tail has such a mask.

    Attributes:
        queries: int64 `[tiles * rows]` packed row of each padded row, or None if the group is all rows in order.
        scatter: (padded rows, packed rows) to write results back, or None if the group is all rows in order.
        shape: (tiles, rows, keys).
        slots: int64 `[tiles * keys]` cache slots; padding repeats a slot of the request's own. A slice where
            they are one run of slots, which can be read in place.
        tail: how many of the last keys are attended under the mask; the others, if any, hold at least one
            key of every tile.
        padding: bool `[tiles, keys]`, True left of a tile's first key; None without padding.
        hidden: bool `[tiles, rows, width]`, True where a row does not see one of the last `width` keys;
            None if all rows see all keys.
    """

    queries: Tensor | None
    scatter: tuple[Tensor, Tensor] | None
    shape: tuple[int, int, int]
    slots: Tensor | slice
    tail: int
    padding: Tensor | None
    hidden: Tensor | None
    _masks: "dict[tuple[int, torch.dtype], Masks]" = field(default_factory=dict)

    def gather(self, entries: Tensor) -> Tensor:
        """Return the entries `[tiles * keys, …]` of a cache `[slots, …]`."""
        return entries[self.slots] if isinstance(self.slots, slice) else entries.index_select(0, self.slots)

    def masks(self, group: int, dtype: torch.dtype) -> "Masks":
        """Return masks for the scores of `group` query heads times rows; made once a step."""
        made = self._masks.get((group, dtype))
        if made is None:
            made = self._masks[group, dtype] = self._make_masks(group, dtype)
        return made

    def biased_masks(self, group: int, dtype: torch.dtype, slopes: Tensor) -> "Masks":
        """Return the masks plus slope times position, ALiBi's bias up to a constant of each row, which changes nothing.

        Positions count from the tail. A row sees every key before the tail. Within the tail, the keys that it sees lie
        in the order of their positions, so a key's position is the number of keys that the row sees before it.

        Args:
            slopes: `[kv_heads * group]`.
        """
        tiles, rows, keys = self.shape
        seen = torch.ones(tiles, rows, self.tail, dtype=torch.int64, device=slopes.device)
        if self.hidden is not None:
            seen[..., self.tail - self.hidden.shape[-1] :] = self.hidden.logical_not()
        places = torch.arange(self.tail - keys, 0, device=slopes.device), (seen.cumsum(-1) - seen)[:, None, None]
        masks = []
        for mask, at in zip(self.masks(group, dtype), places, strict=True):
            bias = (slopes.to(dtype).view(1, -1, group, 1, 1) * at).expand(tiles, -1, -1, rows, -1)
            bias = bias.reshape(tiles, len(slopes) // group, group * rows, at.shape[-1])
            masks.append(bias if mask is None else mask + bias)
        return Masks(*masks)

    def _make_masks(self, group: int, dtype: torch.dtype) -> "Masks":
        where = self.hidden if self.hidden is not None else self.padding
        if where is None:
            return Masks(None, None)
        tiles, rows, keys = self.shape
        device = where.device
        tail = torch.zeros(tiles, group, rows, self.tail, dtype=dtype, device=device)
        prefix = None
        if self.hidden is not None:
            width = self.hidden.shape[-1]
            tail[..., self.tail - width :].masked_fill_(self.hidden[:, None], float("-inf"))
        if self.padding is not None:
            left, right = self.padding[:, None, None].split_with_sizes((keys - self.tail, self.tail), -1)
            tail.masked_fill_(right, float("-inf"))
            if self.tail < keys:
                prefix = torch.zeros(left.shape, dtype=dtype, device=device).masked_fill_(left, float("-inf"))
                prefix = prefix.expand(-1, -1, group * rows, -1)
        return Masks(prefix, tail.view(tiles, 1, group * rows, self.tail))

    @staticmethod
    def build(rows: RaggedRows, tiles: "list[Tile]", window: int = 0) -> "RowGroup":
        device = rows.visible.device
        num_rows = max(tile.rows for tile in tiles)
        longest, shortest = (which(tile.end - tile.begin for tile in tiles) for which in (max, min))
        in_order = all(tile.rows == num_rows for tile in tiles) and len(tiles) * num_rows == rows.visible.numel()
        requests = [rows.table_row(tile.request) for tile in tiles]
        # Per tile its end, its tree's start and its begin.
        bounds = [[tile.end, rows.tree_starts[tile.request], tile.begin] for tile in tiles]
        ends, starts, begins = torch.tensor(bounds, device=device).view(-1, 3, 1, 1).unbind(1)

        padding = None
        slots: Tensor | slice | None = _run_of_slots(rows, tiles[0]) if len(tiles) == 1 else None
        if slots is None:
            entries = ends[:, 0] + torch.arange(-longest, 0, device=device)
            if shortest < longest:
                padding = entries < begins[:, 0]
            entries = entries.maximum(begins[:, 0])
            in_turn = requests == list(range(len(rows.block_tables)))
            tables = rows.block_tables if in_turn else rows.block_tables[requests]
            blocks = tables.gather(1, entries // rows.block_size)
            slots = (blocks * rows.block_size + entries % rows.block_size).flatten()

        queries, scatter = None, None
        if not in_order:
            packed = [tile.start + min(i, tile.rows - 1) for tile in tiles for i in range(num_rows)]
            queries = torch.tensor(packed, device=device)
            real = [t * num_rows + i for t, tile in enumerate(tiles) for i in range(tile.rows)]
            padded = torch.tensor(real, device=device)
            scatter = (padded, queries[padded])

        # A tile's first row sees least: up to itself in a chain, up to the tree's start in a tree.
        width = max(end - min(end - tile.rows + 1, start) for tile, (end, start, _) in zip(tiles, bounds, strict=True))
        # No row's window begins behind that of a last row of a chain.
        slides = window > 0 and any(tile.end - window > tile.begin for tile in tiles)
        if slides:
            width = longest
        hidden = None
        if width:
            visible, words = rows.visible, rows.ancestors
            if queries is not None:
                visible, words = visible[queries], words[queries]
            last = ends + torch.arange(-width, 0, device=device)
            node = last - starts
            words = words.view(len(tiles), num_rows, -1)
            if words.shape[-1] > 1:
                word = (node // WORD_BITS).clamp_(0, words.shape[-1] - 1)
                words = words.gather(2, word.expand(-1, num_rows, -1))
            # A node sees all entries before the tree, so a bit that is read wrongly there decides nothing.
            unrelated = (words >> node.bitwise_and_(WORD_BITS - 1)).bitwise_and_(1) == 0
            hidden = unrelated.logical_and_(last >= visible.view(len(tiles), num_rows, 1))
            if slides:
                own = rows.begins(window)
                own = own if queries is None else own[queries]
                hidden = hidden.logical_or_(last < own.view(len(tiles), num_rows, 1))
        tail = max(width, MASKED_KEYS)
        # One part where the other would hold no key of some tile.
        tail = longest if tail >= shortest else tail
        return RowGroup(queries, scatter, (len(tiles), num_rows, longest), slots, tail, padding, hidden)


class Masks(NamedTuple):
    """Masks of 0 and -inf, to be added to scores; None if all keys are seen.

    Attributes:
        prefix: `[tiles, 1 or kv_heads, group * rows, keys - tail]`, the same for all rows of a tile and stored once.
        tail: `[tiles, 1 or kv_heads, group * rows, tail]`.
    """

    prefix: Tensor | None
    tail: Tensor | None


def _run_of_slots(rows: RaggedRows, tile: Tile) -> slice | None:
    """Return the slots of the tile's keys, if they are consecutive."""
    size = rows.block_size
    skipped = tile.begin // size
    blocks = rows.block_tables[rows.table_row(tile.request), skipped : ceil_div(tile.end, size)].tolist()
    if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
        return None
    start = (blocks[0] - skipped) * size
    return slice(start + tile.begin, start + tile.end)


def num_bits(words: Tensor) -> Tensor:
    """Return the number of bits that are set in each int64 number."""
    # The sign's shifts bring in ones, which the masks take away.
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    # All bytes summed in the highest.
    return (words * 0x0101010101010101) >> 56
