"""Paths in draft trees."""

from specdec.kernels.tree import ROOT, DraftTree


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Return the nodes from the root's child down to `node`."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]
