"""Profile of a draft model on its target: the values of its nodes by rank."""

from collections import Counter
from collections.abc import Sequence

from specdec.core.outputs import TreeTrace


def rank_values(trees: Sequence[TreeTrace]) -> list[float]:
    """Return by rank the share of the trees with such a node in which it was accepted.

    Ranks are those by the draft model's own values in a tree, its most probable node first.
    """
    hits, trees_with = Counter[int](), Counter[int]()
    for tree in trees:
        # Nodes of chains, behind the model's, have no value.
        values = [value for value in tree.values if value is not None]
        accepted = set(tree.path)
        for rank, node in enumerate(sorted(range(len(values)), key=lambda node: -values[node])):
            trees_with[rank] += 1
            hits[rank] += node in accepted
    return [hits[rank] / trees_with[rank] for rank in sorted(trees_with)]
