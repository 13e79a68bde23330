"""The walks with the arguments of the Triton kernels: their twins, which tests and benchmarks compare them with."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from specdec.kernels.reference.gumbel_argmax import gumbel_argmax
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import Acceptance, DraftProbs, NoiseColumns, NoiseKey, PackedTrees, Walk
from specdec.verify.host_walks import follow, walk_rows
from specdec.verify.rejection import walk_rejection


def coupled_walk(scores: Tensor, trees: PackedTrees, noise: NoiseColumns) -> Walk:
    """See `specdec.kernels.triton.coupled_walk`."""
    emitted, starts = gumbel_argmax(scores, noise).tolist(), trees.starts[:-1].tolist()
    rows = [follow(tree, emitted[start:]) for tree, start in zip(_trees_of(trees), starts, strict=True)]
    return _as_walk(rows, trees.max_depth, scores.device)


def rejection_walk(scores: Tensor, draft_probs: DraftProbs | None, trees: PackedTrees, noise: NoiseColumns) -> Walk:
    """See `specdec.kernels.triton.rejection_walk`; computes in float64, and takes it."""
    rows = zip(*(part.tolist() for part in noise), strict=True)
    keys = [NoiseKey(*key) if is_sampled else None for *key, is_sampled in rows]
    found = walk_rows(walk_rejection, scores, _trees_of(trees, draft_probs), keys)
    return _as_walk(found, trees.max_depth, scores.device)


def _trees_of(packed: PackedTrees, draft_probs: DraftProbs | None = None) -> list[DraftTree]:
    """Return the tree of each row, its `draft_probs` in float64."""
    probs = None
    if draft_probs is not None:
        table, rows = draft_probs
        # Rows of roots and nodes without children have no meaning, and may be out of range.
        probs = table[rows.clamp(0, len(table) - 1)].double()
    tokens, parents = packed.tokens.tolist(), packed.parents.tolist()
    trees = []
    for row, (start, end) in enumerate(pairwise(packed.starts.tolist())):
        # Every row before this one has a root, which is no node.
        own = slice(start - row, end - row - 1)
        tree = DraftTree(tuple(tokens[own]), tuple(parents[own]), check=False)
        # Nodes that lie too deep become children of no node.
        near = [
            parent if at <= packed.max_depth else len(tree)
            for parent, at in zip(tree.parents, tree.depths, strict=True)
        ]
        trees.append(DraftTree(tree.tokens, tuple(near), None if probs is None else probs[start:end], check=False))
    return trees


def _as_walk(rows: Sequence[Acceptance], max_depth: int, device: torch.device) -> Walk:
    """Return acceptances in the form in which the kernels give them."""
    paths = [[*path, *[-1] * (max_depth - len(path))] for path, _ in rows]
    return Walk(
        torch.tensor(paths, dtype=torch.int64, device=device).view(len(rows), max_depth),
        torch.tensor([len(path) for path, _ in rows], dtype=torch.int64, device=device),
        torch.tensor([token for _, token in rows], dtype=torch.int64, device=device),
    )
