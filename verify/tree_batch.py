"""Chains of known tokens and their draft trees, packed into the ragged rows of one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.ragged_rows import WORD_BITS, RaggedRows
from specdec.kernels.upload import upload
from specdec.verify.grown_trees import grown_together
from specdec.verify.tree import DraftTree, split_words


class TreeRow(NamedTuple):
    """One request's part of a step.

    Attributes:
        tokens: the chain, `token_ids[num_cached : num_cached + k]`, k >= 1.
        tree: draft nodes under the chain's last token.
        num_cached: tokens whose keys and values are in the cache already.
        block_table: the request's blocks, enough for `num_cached + k + len(tree)` entries.
        num_scored: how many of the chain's last rows need logits, the last one where a token is sampled.
    """

    tokens: Sequence[int]
    tree: DraftTree
    num_cached: int
    block_table: Sequence[int]
    num_scored: int


@dataclass(frozen=True)
class TreeBatch:
    """Device tensors of a step; `rows` says what each token sees.

    Attributes:
        tokens: int64 `[rows]`.
        positions: int64 `[rows]`; a node's is its root's plus its depth, wherever it is stored.
        slots: int64 `[rows]`, where each token's keys and values go.
        rows: visibility and block tables.
        logit_rows: int64: per request its chain's scored rows, then its nodes' rows.
        row_starts: first packed row of each request.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    rows: RaggedRows
    logit_rows: Tensor
    row_starts: tuple[int, ...]

    @staticmethod
    def pack(parts: Sequence[TreeRow], block_size: int, device: torch.device) -> "TreeBatch":
        words = max(1, max(-(-len(part.tree) // WORD_BITS) for part in parts))
        grown = grown_together([part.tree for part in parts])
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        visible: list[int] = []
        ancestors: list[list[int]] = []
        node_rows: list[int] = []
        logit_rows: list[int] = []
        starts: list[int] = []
        for part in parts:
            start, known, size = len(tokens), len(part.tokens), len(part.tree)
            end = part.num_cached + known
            starts.append(start)
            tokens += part.tokens
            positions += range(part.num_cached, end)
            ancestors += [[0] * words] * known
            if grown is None:
                tokens += part.tree.tokens
                positions += [end - 1 + depth for depth in part.tree.depths]
                ancestors += [split_words(bits, words) for bits in part.tree.ancestors]
            else:
                # The device fills in what it alone knows.
                node_rows += range(len(tokens), len(tokens) + size)
                tokens += [0] * size
                positions += [end - 1] * size
                ancestors += [[0] * words] * size
            slots += slots_of(part.block_table, part.num_cached, end + size, block_size)
            visible += range(part.num_cached + 1, end + 1)
            visible += [end] * size
            logit_rows += range(start + known - part.num_scored, start + known + size)
        rows = RaggedRows(
            query_lens=[len(part.tokens) + len(part.tree) for part in parts],
            lengths=[part.num_cached + len(part.tokens) + len(part.tree) for part in parts],
            tree_starts=[part.num_cached + len(part.tokens) for part in parts],
            block_tables=pad_block_tables([part.block_table for part in parts], device),
            visible=upload(visible, device),
            ancestors=upload(ancestors, device),
            block_size=block_size,
        )
        batch = TreeBatch(
            tokens=upload(tokens, device),
            positions=upload(positions, device),
            slots=upload(slots, device),
            rows=rows,
            logit_rows=upload(logit_rows, device),
            row_starts=tuple(starts),
        )
        if grown is not None:
            trees, numbers = grown
            nodes, places = trees.nodes(numbers), upload(node_rows, device)
            batch.tokens.index_copy_(0, places, nodes.tokens)
            batch.positions.index_add_(0, places, nodes.depths)
            rows.ancestors[:, : nodes.ancestors.shape[1]].index_copy_(0, places, nodes.ancestors[:, :words])
        return batch


def slots_of(block_table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Cache slots of entries `start .. end - 1`."""
    return [block_table[entry // block_size] * block_size + entry % block_size for entry in range(start, end)]


def pad_block_tables(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 `[requests, longest]`, padded with block 0, which is never looked up there."""
    longest = max(len(table) for table in tables)
    return upload([[*table, *[0] * (longest - len(table))] for table in tables], device)
