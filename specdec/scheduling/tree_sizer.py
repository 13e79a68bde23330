"""Choice of the tree size that yields most tokens per second at the present load. Pure Python."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from specdec.core.request import AcceptanceHistory
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.step_cost import StepCost

# Steps with trees between plain ones, and the number of plain ones in a row; likewise plain steps between those with
# trees. A single row needs more of them: its first plain steps, and a lone tree, are not representative.
PLAIN, PLAIN_OF_ONE = (24, 2), (128, 10)
TREES, TREES_OF_ONE = (48, 2), (256, 4)
# Steps after which, if there are trees, a single row gets the largest one, so that the nodes of all ranks are observed.
LARGEST_EVERY = 64
# Upper and lower bound of the number of trees that a new one is averaged with, and its decay per step: after a pause, a
# tree counts for more.
MEMORY, PRIOR, FADING = 200.0, 4.0, 0.99
# Upper bound of a node's acceptance probability, whatever a request's history says.
SUREST = 0.9
# Seconds of plain steps after which the size is computed anew for the same load, and most steps in that time: with a
# small model, computing it takes a tenth of a step.
FIT_SECONDS, FIT_STEPS = 0.008, 16
# Factor by which the other kind of steps, plain or with trees, must be predicted faster, as changes take time.
MARGIN = 1.04


class TreeSize(NamedTuple):
    """Trees of a step.

    Attributes:
        nodes: limit of each tree's nodes.
        trees: number of rows that get a tree: all that can, or a single one.
    """

    nodes: int
    trees: int


class DraftableRow(NamedTuple):
    """A row that can draft.

    Attributes:
        history: acceptance history of its request.
        nodes, depth: bounds of its tree.
    """

    history: AcceptanceHistory
    nodes: int
    depth: int


class TreeOutcome(NamedTuple):
    """Verification of one tree.

    Attributes:
        nodes: number of its nodes.
        ranks: ranks of the accepted nodes, 0 for the node that its drafter found most probable.
        history: acceptance history of its request.
    """

    nodes: int
    ranks: Sequence[int]
    history: AcceptanceHistory


class TreeSizer:
    """Adapts tree size to load.

    Each step uses the size predicted to maximise tokens per second, from measured step costs and observed acceptance
    rates. If drafting would not help, it is skipped. For n nodes per row the prediction is

        (S + r (D_1 v_1 + ... + D_n v_n)) / (pass(T + D_1 + ... + D_n) + draft(D_1 trees of at most n levels))

    S rows yield a token, D_i of them may draft i nodes or more, and T is the number of known tokens. v_i is the
    probability that a tree's node of rank i is accepted, ranked by the drafter's own estimate. r is the acceptance of
    these rows' own trees relative to the average. v and r are observed as the engine runs, pass and draft are measured.
    Values belong to ranks and not to single nodes, so that the choice precedes drafting and a plain step drafts
    nothing.
    """

    def __init__(self, cost: StepCost, shape: DraftShape) -> None:
        self.cost, self.shape = cost, shape
        self.values = [0.7 / (1 + 0.5 * rank) for rank in range(shape.nodes)]
        self._seen = [PRIOR] * shape.nodes
        self._steps = 0
        self._load: tuple[int, int, int, list[int]] | None = None
        self._best = (0, 0.0)
        # Number of the step in which the size is computed anew.
        self._next_fit = 0
        # Whether steps have trees, and the number of steps since that changed or the other kind was tried.
        self._drafts, self._alike = False, 0
        self._learnt = 0
        self._sizes = sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if n < shape.nodes})
        self._sizes.append(shape.nodes)

    def size(self, sampled: int, known: int, rows: Sequence[DraftableRow]) -> TreeSize:
        """Choose the trees of a step, none if plain steps are as fast.

        Now and then some steps are of the other kind, so that the costs of both stay up to date.

        Args:
            sampled: rows that yield a token.
            known: tokens of the step without drafts.
            rows: those that can draft.
        """
        drafting = len(rows)
        if drafting == 0:
            return TreeSize(0, 0)
        bounds = sorted(row.nodes for row in rows)
        load = sampled, known, max(row.depth for row in rows), bounds
        if load != self._load or self._steps >= self._next_fit:
            self._load, self._best = load, self._fit(*load, sum(row.history.ratio for row in rows) / drafting)
            plain = self.cost.step(sampled, known, 0, 0)
            self._next_fit = self._steps + max(1, min(FIT_STEPS, int(FIT_SECONDS / max(plain, 1e-9))))
        best, gain = self._best
        self._steps += 1
        if self._drafts != (gain * MARGIN > 1 if self._drafts else gain > MARGIN):
            self._drafts, self._alike = not self._drafts, 0
        if sampled == 1:
            every, run = PLAIN_OF_ONE if self._drafts else TREES_OF_ONE
        else:
            every, run = PLAIN if self._drafts else TREES
        self._alike = (self._alike + 1) % (every + run)
        if self._drafts != (self._alike < every):
            return TreeSize(0, 0)
        if self._drafts and self._steps % LARGEST_EVERY == 0:
            return TreeSize(bounds[-1], 1)
        return TreeSize(best, drafting)

    def _fit(self, sampled: int, known: int, depth: int, bounds: Sequence[int], ratio: float) -> tuple[int, float]:
        """Return the best number of nodes from 1 on, and its tokens per second over those of plain steps.

        Args:
            depth: the deepest row's bound.
            bounds: the rows' bounds of nodes, ascending.
            ratio: mean of the rows' acceptance ratios.
        """
        plain = sampled / max(self.cost.step(sampled, known, 0, 0), 1e-9)
        best, best_rate = 0, 0.0
        value, nodes, rank = 0.0, 0, 0
        for size in self._sizes:
            while rank < size:
                # Rows whose trees may have a node of this rank.
                able = len(bounds) - bisect_right(bounds, rank)
                value += able * min(ratio * self.values[rank], SUREST)
                nodes += able
                rank += 1
            seconds = self.cost.step(sampled, known + nodes, len(bounds), min(size, depth))
            rate = (sampled + value) / max(seconds, 1e-9)
            if rate > best_rate:
                best, best_rate = size, rate
        return min(best, bounds[-1]), best_rate / plain

    def learn(self, outcomes: Sequence[TreeOutcome]) -> None:
        """Update the values of ranks and the requests' histories."""
        fading = FADING ** (self._steps - self._learnt)
        self._learnt = self._steps
        self._seen = [max(PRIOR, seen * fading) for seen in self._seen]
        hits = [0] * self.shape.nodes
        trees = [0] * (self.shape.nodes + 1)
        predicted = [0.0, *accumulate(self.values)]
        for size, ranks, history in outcomes:
            history.learn(len(ranks), predicted[size])
            trees[size] += 1
            for rank in ranks:
                hits[rank] += 1
        count = 0
        for rank in range(self.shape.nodes - 1, -1, -1):
            # Number of trees that have a node of this rank.
            count += trees[rank + 1]
            if count:
                self._seen[rank] = min(self._seen[rank] + count, MEMORY)
                share = min(1.0, count / self._seen[rank])
                self.values[rank] += share * (hits[rank] / count - self.values[rank])
