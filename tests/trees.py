"""Chains, and paths in draft trees."""

from collections.abc import Sequence

from specdec.kernels.types.tree import ROOT, DraftTree


def chain_of(tokens: Sequence[int]) -> DraftTree:
    """Return a tree of one path."""
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Return the nodes from the root's child down to `node`."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]
