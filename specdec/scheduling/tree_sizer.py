"""How many draft nodes repay what they cost at this load. Pure Python."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from specdec.core.request import AcceptanceHistory
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.step_cost import StepCost

# Steps with trees after which some are plain, and how many; likewise the other way round. Of a single row the first few
# plain ones tell nothing, and so does a lone tree.
PLAIN, PLAIN_OF_ONE = (24, 2), (128, 10)
TREES, TREES_OF_ONE = (48, 2), (256, 4)
# Steps after which, if there are trees, a single row gets the largest one, so that its outermost nodes are known.
LARGEST_EVERY = 64
# Trees that count against a new one at most and at least, and how they fade from step to step: a rare tree says more.
MEMORY, PRIOR, FADING = 200.0, 4.0, 0.99
# The chance of a node, whatever a request's record says.
SUREST = 0.9
# Steps after which the same load is fitted anew, as it takes as long as a few of a small model's operations; at once
# where its rows' records have moved by this share.
FIT_EVERY, MOVED = 4, 0.03
# The other kind of steps has to be so many times faster, predicted, to be preferred: a change takes time of its own.
MARGIN = 1.04


class TreeSize(NamedTuple):
    """What rows get of a step.

    Attributes:
        nodes: of each tree at most.
        trees: rows that get one, all that can or a single one.
    """

    nodes: int
    trees: int


class TreeOutcome(NamedTuple):
    """How a tree has fared.

    Attributes:
        nodes: of it.
        ranks: of the nodes accepted.
        record: of its request.
    """

    nodes: int
    ranks: Sequence[int]
    record: AcceptanceHistory


class TreeSizer:
    """Fits trees to the load: as many nodes per row as bring the most tokens a second.

    With S rows that yield a token, D of them able to draft, T known tokens, v_i the chance that a tree's node of
    rank i, by its drafter's own estimate, is on the accepted path, and r how many times as many tokens these rows' own
    trees have brought on average, n nodes a row are worth

        (S + D r (v_1 + ... + v_n)) / (pass(T + D n) + draft(D trees of at most n levels))

    v and r are counted as the engine runs; pass and draft are measured. (Design section 5, with the values of ranks in
    place of those of single nodes, so that the choice is made before anything is drafted and a plain step drafts
    nothing.)

    Args:
        cost: seconds of a step's parts.
        shape: bounds of a tree.
    """

    def __init__(self, cost: StepCost, shape: DraftShape) -> None:
        self.cost, self.shape = cost, shape
        self.values = [0.7 / (1 + 0.5 * rank) for rank in range(shape.nodes)]
        self._seen = [PRIOR] * shape.nodes
        self._steps = 0
        self._load: tuple[int, int, int] | None = None
        self._ratios = 0.0
        self._best = (0, 0.0)
        # Whether steps have trees, and how many have been so since that changed or the other kind was tried.
        self._drafts, self._alike = False, 0
        self._learnt = 0
        self._sizes = sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if n < shape.nodes})
        self._sizes.append(shape.nodes)

    def size(self, sampled: int, known: int, records: Sequence[AcceptanceHistory]) -> TreeSize:
        """Trees for a step; none where plain steps are as good.

        Every now and then some steps are of the other kind, so that what is known of both stays true.

        Args:
            sampled: rows that yield a token.
            known: tokens of the step without drafts.
            records: of the rows that can draft.
        """
        drafting = len(records)
        if drafting == 0:
            return TreeSize(0, 0)
        load, ratios = (sampled, known, drafting), sum(record.ratio for record in records)
        moved = abs(ratios - self._ratios) > MOVED * self._ratios
        if load != self._load or moved or self._steps % FIT_EVERY == 0:
            self._load, self._ratios, self._best = load, ratios, self._fit(*load, ratios)
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
            return TreeSize(self.shape.nodes, 1)
        return TreeSize(best, drafting)

    def _fit(self, sampled: int, known: int, drafting: int, ratios: float) -> tuple[int, float]:
        """The best number of nodes from 1 on, and how many times the tokens a second of plain steps it brings.

        Args:
            ratios: sum of those of the rows' records.
        """
        plain = sampled / max(self.cost.step(sampled, known, 0, 0), 1e-9)
        best, best_rate = 0, 0.0
        ratio, value, rank = ratios / drafting, 0.0, 0
        for size in self._sizes:
            while rank < size:
                value += min(ratio * self.values[rank], SUREST)
                rank += 1
            seconds = self.cost.step(sampled, known + drafting * size, drafting, min(size, self.shape.depth))
            rate = (sampled + drafting * value) / max(seconds, 1e-9)
            if rate > best_rate:
                best, best_rate = size, rate
        return best, best_rate / plain

    def learn(self, outcomes: Sequence[TreeOutcome]) -> None:
        """Take in how trees have fared."""
        fading = FADING ** (self._steps - self._learnt)
        self._learnt = self._steps
        self._seen = [max(PRIOR, seen * fading) for seen in self._seen]
        hits = [0] * self.shape.nodes
        trees = [0] * (self.shape.nodes + 1)
        predicted = [0.0, *accumulate(self.values)]
        for size, ranks, record in outcomes:
            record.learn(len(ranks), predicted[size])
            trees[size] += 1
            for rank in ranks:
                hits[rank] += 1
        count = 0
        for rank in range(self.shape.nodes - 1, -1, -1):
            # Trees that have a node of this rank.
            count += trees[rank + 1]
            if count:
                self._seen[rank] = min(self._seen[rank] + count, MEMORY)
                share = min(1.0, count / self._seen[rank])
                self.values[rank] += share * (hits[rank] / count - self.values[rank])
