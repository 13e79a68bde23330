"""The walk down each tree by the tokens that the target emits: what a CPU runs, and the Triton kernel's reference."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import NO_TOKEN, ROOT, Acceptance, DraftProbs, PackedTrees, Walk


def follow(tree: DraftTree, emitted: Sequence[int]) -> Acceptance:
    """Follow the emitted tokens down the tree; `emitted[0]` is the root's, `emitted[1 + i]` node i's."""
    path, node, wanted = list[int](), ROOT, emitted[0]
    # A parent comes before its children, and siblings differ: one pass in order finds all of the path.
    for child, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        if parent == node and token == wanted != NO_TOKEN:
            path.append(child)
            node, wanted = child, emitted[1 + child]
    return Acceptance(tuple(path), wanted)


def tree_walk(emitted: Tensor, trees: PackedTrees) -> Walk:
    """See `specdec.kernels.triton.tree_walk`."""
    said, starts = emitted.tolist(), trees.starts[:-1].tolist()
    rows = [follow(tree, said[start:]) for tree, start in zip(trees_of(trees), starts, strict=True)]
    return as_walk(rows, trees.max_depth, emitted.device)


def trees_of(packed: PackedTrees, draft_probs: DraftProbs | None = None) -> list[DraftTree]:
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


def as_walk(rows: Sequence[Acceptance], max_depth: int, device: torch.device) -> Walk:
    """Return acceptances in the form in which the kernels give them."""
    paths = [[*path, *[-1] * (max_depth - len(path))] for path, _ in rows]
    return Walk(
        torch.tensor(paths, dtype=torch.int64, device=device).view(len(rows), max_depth),
        torch.tensor([len(path) for path, _ in rows], dtype=torch.int64, device=device),
        torch.tensor([token for _, token in rows], dtype=torch.int64, device=device),
    )
