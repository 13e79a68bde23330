"""Drafts from the text itself: continuations of earlier occurrences of the last tokens (prompt lookup, Saxena 2023)."""

from collections.abc import Sequence

import numpy as np

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.kernels.draft_trees import HostTrees
from specdec.kernels.tree import ROOT, DraftTree

# Least number of last tokens that must occur earlier in the text, and most tokens compared to rank the places.
LEAST_MATCH = 2
LONGEST_MATCH = 8


class NGramDrafter:
    """Drafter without weights and cache: a tree of the continuations of several places in the text.

    Places that match more of the last tokens come first, later ones before earlier ones among equals. Each adds its
    continuation as a chain, which shares its beginning with those before it.

    Args:
        shape: bounds of a tree; at most `branching` places are used.
    """

    def __init__(self, shape: DraftShape) -> None:
        self.shape = shape

    def propose(self, rows: Sequence[DraftRow]) -> HostTrees:
        return HostTrees([self._tree(row) if row.num_nodes and row.max_depth else DraftTree() for row in rows])

    def _tree(self, row: DraftRow) -> DraftTree:
        depth = min(self.shape.depth, row.max_depth)
        tokens: list[int] = []
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}
        text = np.fromiter(row.token_ids, np.int64, len(row.token_ids))
        for place in best_places(text, self.shape.branching):
            node = ROOT
            for token in text[place : place + depth].tolist():
                child = children.get((node, token))
                if child is None:
                    if len(tokens) == row.num_nodes:
                        return DraftTree(tuple(tokens), tuple(parents))
                    child = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child
        return DraftTree(tuple(tokens), tuple(parents))


def best_places(text: "np.typing.NDArray[np.int64]", most: int) -> list[int]:
    """Return the places of tokens that follow the same tokens as the next one will, best places first.

    Args:
        text: int64 `[tokens]`.
        most: most places returned.
    """
    size = len(text)
    # Places behind a match; the end of the text itself is not one.
    ends = np.arange(1, size)
    lengths = np.zeros(len(ends), np.int64)
    agreeing = np.arange(len(ends))
    for back in range(1, min(LONGEST_MATCH, size - 1) + 1):
        agreeing = agreeing[ends[agreeing] >= back]
        agreeing = agreeing[text[ends[agreeing] - back] == text[size - back]]
        lengths[agreeing] += 1
    # Reversed and stable: later places come first among equals.
    order = np.argsort(-lengths[::-1], kind="stable")[:most]
    found = len(ends) - 1 - order
    return [int(ends[i]) for i in found if lengths[i] >= LEAST_MATCH]
