"""Profile of a draft model on its target: values of its nodes by rank and by confidence, and their calibration."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from specdec.core.outputs import TreeTrace

# Lower bounds of the confidence bins but the first, which begins at 0.
EDGES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
# Ranks among siblings, the most confident first; the last one stands for all behind it.
RANKS = 4
# Equally wide bins of predicted values, over which calibration is measured.
CALIBRATION_BINS = 10
# Nodes that a chance that was never observed stands for.
GENERIC = 8.0


@dataclass(frozen=True)
class AcceptedShare:
    """Share of nodes accepted among those whose parents were.

    Attributes:
        nodes: their number.
    """

    accepted: float
    nodes: int


@dataclass(frozen=True)
class CalibrationBin:
    """Nodes whose values were predicted to be about equal.

    Attributes:
        predicted: mean of the predicted values.
        accepted: share of the nodes that was accepted.
    """

    nodes: int
    predicted: float
    accepted: float


@dataclass(frozen=True)
class DraftProfile:
    """Values of a draft model's nodes.

    Attributes:
        rank_values: share of the trees with a node of each rank in which it was accepted, the model's most probable
            node first.
        chances: by rank among siblings and confidence bin.
        calibration: of values predicted from `chances` of half of the trees, measured on the other half.
    """

    rank_values: list[float]
    chances: list[list[AcceptedShare]]
    calibration: list[CalibrationBin]

    @classmethod
    def of(cls, trees: Sequence[TreeTrace]) -> Self:
        """Profile the trees of steps, as many as possible."""
        known = [_Tree(tree) for tree in trees if tree.tokens]
        learnt, tested = _Chances(known[::2]), known[1::2]
        bins = [_CalibrationSum() for _ in range(CALIBRATION_BINS)]
        for tree in tested:
            for node, value in enumerate(learnt.values(tree)):
                bins[min(int(value * CALIBRATION_BINS), CALIBRATION_BINS - 1)].add(value, node in tree.accepted)
        hits, trees_with = Counter[int](), Counter[int]()
        for tree in known:
            trees_with.update(tree.ranks)
            hits.update(tree.ranks[node] for node in tree.accepted)
        everything = _Chances(known)
        return cls(
            [hits[rank] / trees_with[rank] for rank in sorted(trees_with)],
            [[everything.chance(rank, place) for place in range(len(EDGES) + 1)] for rank in range(RANKS)],
            [each.bin for each in bins],
        )

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: mean difference of predicted and observed acceptance, weighted by nodes."""
        total = sum(each.nodes for each in self.calibration)
        return sum(each.nodes * abs(each.predicted - each.accepted) for each in self.calibration) / max(1, total)


class _Tree:
    """A traced tree: of each node its parent, confidence, rank among siblings and rank in the tree."""

    def __init__(self, trace: TreeTrace) -> None:
        # Nodes of chains, behind the model's, have no value.
        values = [value for value in trace.values if value is not None]
        self.parents, self.accepted = trace.parents[: len(values)], {node for node in trace.path if node < len(values)}
        order = sorted(range(len(values)), key=lambda node: -values[node])
        self.ranks, self.cells = [0] * len(values), [(0, 0)] * len(values)
        siblings = Counter[int]()
        for rank, node in enumerate(order):
            parent = self.parents[node]
            above = values[parent] if parent >= 0 else 0.0
            confidence = math.exp(min(values[node] - above, 0.0)) if values[node] > -math.inf else 0.0
            self.ranks[node] = rank
            self.cells[node] = min(siblings[parent], RANKS - 1), bisect_right(EDGES, confidence)
            siblings[parent] += 1


class _Chances:
    """Counts of nodes whose parents were accepted, by cell."""

    def __init__(self, trees: Iterable[_Tree]) -> None:
        self.nodes, self.accepted = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for tree in trees:
            for node, cell in enumerate(tree.cells):
                if tree.parents[node] < 0 or tree.parents[node] in tree.accepted:
                    self.nodes[cell] += 1
                    self.accepted[cell] += node in tree.accepted

    def chance(self, rank: int, place: int) -> AcceptedShare:
        """Return the chance of a cell, near the model's own confidence where few nodes were seen."""
        bounds = (0.0, *EDGES, 1.0)
        own = sum(list(pairwise(bounds))[place]) / 2 / (1 + 0.25 * rank)
        nodes = self.nodes[rank, place]
        return AcceptedShare((self.accepted[rank, place] + GENERIC * own) / (nodes + GENERIC), nodes)

    def values(self, tree: _Tree) -> list[float]:
        """Return the product of the chances on each node's path."""
        values = list[float]()
        for parent, cell in zip(tree.parents, tree.cells, strict=True):
            values.append(self.chance(*cell).accepted * (values[parent] if parent >= 0 else 1.0))
        return values


class _CalibrationSum:
    def __init__(self) -> None:
        self.nodes, self.predicted, self.accepted = 0, 0.0, 0

    def add(self, value: float, is_accepted: bool) -> None:
        self.nodes += 1
        self.predicted += value
        self.accepted += is_accepted

    @property
    def bin(self) -> CalibrationBin:
        count = max(1, self.nodes)
        return CalibrationBin(self.nodes, self.predicted / count, self.accepted / count)
