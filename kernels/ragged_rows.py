"""Where the query rows of a step lie and which cache slots each of them sees."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

WORD_BITS = 64
# Query rows of one tile of a long chain: bounds the score matrix and skips keys above the diagonal.
TILE_ROWS = 128


@dataclass(frozen=True)
class RaggedRows:
    """Query rows of several requests, packed one after another, over a paged cache.

    A request's cache is a sequence of entries `0 .. length - 1`; entry `s` lies in slot
    `block_table[s // block_size] * block_size + s % block_size`. Query row `i` of request `b` sees
    entries `[first, visible[i])` and, of the draft tree whose node 0 is entry `tree_starts[b]`, the
    nodes whose bit is set in `ancestors[i]` (bit j % 64 of word j // 64, its own bit included).

    A request's rows are its last cache entries, in order: a chain, then tree nodes after their parents. So
    none sees an entry beyond its own.

    Attributes:
        query_lens: query rows of each request, all positive, host side.
        lengths: cache entries of each request once this step's keys are stored, host side.
        tree_starts: entry of each request's tree node 0; equal to `lengths` where there is no tree.
        block_tables: int64 `[requests, blocks]`; entries beyond a request's blocks are never read.
        visible: int64 `[rows]`.
        ancestors: int64 `[rows, words]`.
        block_size: entries a block.
        first: first entry that any row sees. The EAGLE head's entry 0 does not exist (it would need
            the feature of token -1), so its rows see from entry 1.
    """

    query_lens: Sequence[int]
    lengths: Sequence[int]
    tree_starts: Sequence[int]
    block_tables: Tensor
    visible: Tensor
    ancestors: Tensor
    block_size: int
    first: int = 0

    @cached_property
    def row_groups(self) -> "list[RowGroup]":
        """Tiles of alike shape, batched: what the plain-torch attention loops over, made once a step."""
        buckets: dict[tuple[int, int], list[Tile]] = {}
        start = 0
        for request, (count, length) in enumerate(zip(self.query_lens, self.lengths, strict=True)):
            for at in range(0, count, TILE_ROWS):
                rows = min(TILE_ROWS, count - at)
                tile = Tile(request, start + at, rows, end=length - count + at + rows)
                buckets.setdefault((rows.bit_length(), max(tile.end, 256).bit_length()), []).append(tile)
            start += count
        return [RowGroup.build(self, tiles) for tiles in buckets.values()]


@dataclass(frozen=True)
class Tile:
    """Consecutive query rows of one request, which see no entry from `end` on."""

    request: int
    start: int
    rows: int
    end: int


@dataclass(frozen=True)
class RowGroup:
    """Tiles padded to one shape `[tiles, rows]` by `[tiles, keys]`, keys aligned at their right end.

    Aligned so, the entries that not every row sees are the same last columns in all tiles, and a mask is
    needed for those alone.

    Attributes:
        queries: int64 `[tiles * rows]` packed row of each padded row, or None if the group is all rows in order.
        scatter: (padded rows, packed rows) to write results back, or None likewise.
        shape: (tiles, rows, keys).
        slots: int64 `[tiles * keys]` cache slots; padding repeats a slot of the request's own. A slice where
            they are one run of slots, which can be read in place.
        padding: bool `[tiles, 1, 1, 1, keys]`, True left of a tile's first key; None without padding.
        hidden: bool `[tiles, 1, 1, rows, width]`, True where a row does not see one of the last `width`
            keys; None if all rows see all keys.
    """

    queries: Tensor | None
    scatter: tuple[Tensor, Tensor] | None
    shape: tuple[int, int, int]
    slots: Tensor | slice
    padding: Tensor | None
    hidden: Tensor | None
    width: int = field(default=0)

    def gather(self, entries: Tensor) -> Tensor:
        """`[tiles, keys, …]` of a cache's entries `[slots, …]`."""
        found = entries[self.slots] if isinstance(self.slots, slice) else entries.index_select(0, self.slots)
        return found.view(self.shape[0], self.shape[2], *entries.shape[1:])

    @staticmethod
    def build(rows: RaggedRows, tiles: "list[Tile]") -> "RowGroup":
        device = rows.visible.device
        num_rows = max(tile.rows for tile in tiles)
        num_keys = max(tile.end for tile in tiles) - rows.first
        in_order = all(tile.rows == num_rows for tile in tiles) and len(tiles) * num_rows == rows.visible.numel()
        ends = torch.tensor([[tile.end] for tile in tiles], device=device)
        requests = [tile.request for tile in tiles]

        padding = None
        slots: Tensor | slice | None = _run_of_slots(rows, tiles[0]) if len(tiles) == 1 else None
        if slots is None:
            entries = ends + torch.arange(-num_keys, 0, device=device)
            if any(tile.end - rows.first != num_keys for tile in tiles):
                padding = (entries < rows.first)[:, None, None, None]
            entries = entries.clamp_(min=rows.first)
            in_turn = requests == list(range(len(rows.lengths)))
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

        visible = (rows.visible if queries is None else rows.visible[queries]).view(len(tiles), num_rows, 1)
        width = int((ends[:, :, None] - visible).max())
        hidden = None
        if width:
            words = rows.ancestors if queries is None else rows.ancestors[queries]
            starts = torch.tensor([[[rows.tree_starts[request]]] for request in requests], device=device)
            last = ends[:, :, None] + torch.arange(-width, 0, device=device)
            node = (last - starts).expand(-1, num_rows, -1)
            word = words.view(len(tiles), num_rows, -1).gather(
                2, (node // WORD_BITS).clamp(0, rows.ancestors.shape[1] - 1)
            )
            is_ancestor = (node >= 0) & ((word >> (node % WORD_BITS)) & 1).bool()
            hidden = ~((last < visible) | is_ancestor)[:, None, None]
        return RowGroup(queries, scatter, (len(tiles), num_rows, num_keys), slots, padding, hidden, width)


def _run_of_slots(rows: RaggedRows, tile: Tile) -> slice | None:
    """The slots that the tile's keys lie in, if they are consecutive."""
    size = rows.block_size
    blocks = rows.block_tables[tile.request, : -(-tile.end // size)].tolist()
    if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
        return None
    return slice(blocks[0] * size + rows.first, blocks[0] * size + tile.end)
