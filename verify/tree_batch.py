"""Chains of known tokens and their draft trees, packed into the ragged rows of one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.ragged_rows import WORD_BITS, RaggedRows
from specdec.kernels.types.tree import TreeRow, split_words
from specdec.kernels.types.upload import upload


@dataclass(frozen=True)
class TreeBatch:
    """Device tensors of a step.

    Attributes:
        tokens: int64 `[rows]`.
        positions: int64 `[rows]`; a node's is its root's plus its depth, wherever it is stored.
        slots: int64 `[rows]`, where each token's keys and values are stored.
        rows: what each token sees, and block tables.
        logit_rows: int64, per request its chain's scored rows, then its nodes' rows.
        row_starts: first packed row of each request.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    rows: RaggedRows
    logit_rows: Tensor
    row_starts: tuple[int, ...]

    @staticmethod
    def pack(parts: Sequence[TreeRow], trees: DraftTrees, block_size: int, device: torch.device) -> "TreeBatch":
        """Pack chains, each with its draft nodes behind it.

        Args:
            trees: under the last tokens of the first chains; the others have none.
        """
        sizes = [*trees.sizes, *[0] * (len(parts) - len(trees.sizes))]
        words = max(1, ceil_div(max(sizes), WORD_BITS))
        tokens, positions, slots, visible, node_rows, logit_rows, starts = (list[int]() for _ in range(7))
        ancestors: list[list[int]] = []
        for row, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            start, known = len(tokens), len(part.tokens)
            end = part.num_cached + known
            starts.append(start)
            tokens += part.tokens
            positions += range(part.num_cached, end)
            ancestors += [[0] * words] * known
            if size:
                nodes = trees.host_nodes(row)
                node_rows += range(start + known, start + known + size)
                tokens += nodes.tokens
                positions += [end - 1 + depth for depth in nodes.depths]
                ancestors += [split_words(bits, words) for bits in nodes.ancestors]
            slots += slots_of(part.block_table, part.num_cached, end + size, block_size)
            visible += range(part.num_cached + 1, end + 1)
            visible += [end] * size
            logit_rows += range(start + known - part.num_scored, start + known + size)
        rows = RaggedRows(
            query_lens=[len(part.tokens) + size for part, size in zip(parts, sizes, strict=True)],
            lengths=[part.num_cached + len(part.tokens) + size for part, size in zip(parts, sizes, strict=True)],
            tree_starts=[part.num_cached + len(part.tokens) for part in parts],
            block_tables=pad_block_tables([part.block_table for part in parts], device),
            visible=upload(visible, device),
            ancestors=upload(ancestors, device),
            block_size=block_size,
            adapters=[part.adapter for part in parts] if any(part.adapter for part in parts) else (),
        )
        batch = TreeBatch(
            tokens=upload(tokens, device),
            positions=upload(positions, device),
            slots=upload(slots, device),
            rows=rows,
            logit_rows=upload(logit_rows, device),
            row_starts=tuple(starts),
        )
        if node_rows:
            trees.complete(batch.tokens, batch.positions, rows.ancestors, node_rows)
        return batch


def slots_of(block_table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Return the cache slots of entries `start .. end - 1`."""
    return [block_table[entry // block_size] * block_size + entry % block_size for entry in range(start, end)]


def pad_block_tables(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return block tables as int64 `[requests, longest]`, padded with block 0, which is never read there."""
    longest = max(len(table) for table in tables)
    return upload([[*table, *[0] * (longest - len(table))] for table in tables], device)
