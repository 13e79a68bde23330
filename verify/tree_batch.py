"""Chains of known tokens and their draft trees, packed into the ragged rows of one forward pass."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.types.device_tables import DeviceTables, tables_of
from specdec.kernels.types.device_trees import Completion
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.ragged_rows import WORD_BITS, RaggedRows
from specdec.kernels.types.tree import TreeRow, split_words
from specdec.kernels.types.upload import Packet, PacketLayout


class TreeBatch(NamedTuple):
    """Device tensors of a step.

    Attributes:
        tokens: int64 `[rows]`.
        positions: int64 `[rows]`; a node's is its root's plus its depth, wherever it is stored.
        slots: int64 `[rows]`, where each token's keys and values are stored.
        rows: what each token sees, and block tables.
        logit_rows: int64, per request its chain's scored rows, then its nodes' rows; None for all rows.
        row_starts: first packed row of each request.
        sources: int64 `[rows]`, slot of the token before; None where a request's first entry is 0.
        received: `[rows, size]`, what the pipeline stage before has sent; None where there is none.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    rows: RaggedRows
    logit_rows: Tensor | None
    row_starts: tuple[int, ...]
    sources: Tensor | None = None
    received: Tensor | None = None

    def scored(self, states: Tensor) -> Tensor:
        """Return those of states `[rows, ...]` that logits are made of."""
        return states if self.logit_rows is None else states.index_select(0, self.logit_rows)

    @staticmethod
    def pack(parts: Sequence[TreeRow], trees: DraftTrees, block_size: int, device: torch.device) -> "TreeBatch":
        """Pack chains, each with its draft nodes behind it; see `pack_into`."""
        packet = Packet(device)
        packed = TreeBatch.pack_into(packet, parts, trees, block_size)
        packet.send()
        return packed.complete()

    @staticmethod
    def pack_into(
        packet: Packet,
        parts: Sequence[TreeRow],
        trees: DraftTrees,
        block_size: int,
        layout: PacketLayout | None = None,
        least_words: int = 1,
        first: int = 0,
        firsts: Sequence[int] = (),
        device_tables: DeviceTables | None = None,
    ) -> "PackedBatch":
        """Return what is packed, beside other numbers for the device.

        Args:
            trees: under the last tokens of the first chains; the others have none.
            layout: of `row_layout`, as which the rows are to lie.
            least_words: words of ancestor bits at least.
            first: first entry that there is, 0 or 1; positions count from it.
            firsts: see `RaggedRows`.
            device_tables: where the block tables lie on the device; None to send them whole.
        """
        sizes = [*trees.sizes, *[0] * (len(parts) - len(trees.sizes))]
        words = max(least_words, ceil_div(max(sizes), WORD_BITS))
        numbers: tuple[list[int], ...] = ([], [], [], [], [], [])
        tokens, positions, slots, visible, ancestors, sources = numbers
        node_rows: list[int] = []
        logit_rows: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        for row, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            start, known = len(tokens), len(part.tokens)
            end = part.num_cached + known
            starts.append(start)
            ends.append(end)
            tokens += part.tokens
            positions += range(part.num_cached - first, end - first)
            ancestors += [0] * (words * known)
            visible += range(part.num_cached + 1, end + 1)
            if size:
                nodes = trees.host_nodes(row)
                node_rows += range(start + known, start + known + size)
                tokens += nodes.tokens
                positions += [end - 1 - first + depth for depth in nodes.depths]
                for bits in nodes.ancestors:
                    ancestors += split_words(bits, words)
                visible += [end] * size
            entries = slots_of(part.block_table, part.num_cached - first, end + size, block_size)
            slots += entries[first:]
            if first:
                sources += entries[:-first]
            logit_rows += range(start + known - part.num_scored, start + known + size)
        tables, table_rows = tables_of([part.block_table for part in parts], packet, device_tables)
        wanted = None if len(logit_rows) == len(tokens) else packet.add(logit_rows)
        completion = trees.completion(node_rows, packet) if node_rows else None
        # Last, so that what a graph takes besides follows it.
        image = None if layout is None else packet.begin(layout)
        # In the order of `row_layout`.
        own_tokens, own_positions, own_slots, own_visible, own_ancestors, *before = packet.add_lists(
            *(numbers if first else numbers[:-1])
        )
        rows = RaggedRows(
            query_lens=[stop - start for start, stop in pairwise([*starts, len(tokens)])],
            lengths=[end + size for end, size in zip(ends, sizes, strict=True)] if node_rows else ends,
            tree_starts=ends,
            block_tables=tables,
            visible=own_visible,
            ancestors=own_ancestors.view(-1, words),
            block_size=block_size,
            first=first,
            firsts=firsts,
            adapters=[part.adapter for part in parts] if any(part.adapter for part in parts) else (),
            table_rows=table_rows,
        )
        batch = TreeBatch(
            tokens=own_tokens,
            positions=own_positions,
            slots=own_slots,
            rows=rows,
            logit_rows=wanted,
            row_starts=tuple(starts),
            sources=before[0] if before else None,
        )
        return PackedBatch(batch, completion, image)


@lru_cache(maxsize=1024)
def row_layout(tokens: int, words: int, first: int = 0) -> PacketLayout:
    """Return how the rows of a batch lie in a packet: tokens, positions, slots, what each sees, ancestors, sources."""
    layout = PacketLayout()
    for _ in range(4):
        layout.add(tokens)
    layout.add(tokens, words)
    if first:
        layout.add(tokens)
    return layout


def captured_batch(
    layout: PacketLayout, memory: Tensor, block_tables: Tensor, block_size: int, first: int = 0
) -> TreeBatch:
    """Return the batch that a graph is captured with.

    Attention reads its plan alone, so the lengths of rows are not given.

    Args:
        layout: of `row_layout`.
        memory: bytes of the layout's size.
    """
    tokens, positions, slots, visible, ancestors, *sources = layout.views(memory)
    rows = RaggedRows(
        query_lens=(),
        lengths=(),
        tree_starts=(),
        block_tables=block_tables,
        visible=visible,
        ancestors=ancestors,
        block_size=block_size,
        first=first,
    )
    return TreeBatch(tokens, positions, slots, rows, None, (), sources[0] if sources else None)


class PackedBatch(NamedTuple):
    """A batch whose numbers are on their way.

    Attributes:
        batch: what the host knows of it.
        completion: see `HostTrees.completion`.
        image: the rows as bytes, as `row_layout` says, once the batch is complete; None if it was not asked for.
    """

    batch: TreeBatch
    completion: Completion | None
    image: Tensor | None

    def complete(self) -> TreeBatch:
        """Return the batch, once its packet is sent."""
        if self.completion is not None:
            self.completion(self.batch.tokens, self.batch.positions, self.batch.rows.ancestors)
        return self.batch


def slots_of(block_table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Return the cache slots of entries `start .. end - 1`."""
    return [block_table[entry // block_size] * block_size + entry % block_size for entry in range(start, end)]
