"""How many draft nodes repay what they cost at this load. Pure Python."""

from collections.abc import Sequence
from typing import NamedTuple

from specdec.draft_heads.draft_shape import DraftShape
from specdec.step_cost import StepCost

# Steps after which one is of the other kind, where the kinds are worth nearly the same, and where they are not.
OTHER_EVERY, OTHER_SELDOM = 16, 128
CLOSE = 1.25
# Steps after which a single row gets the largest tree, so that its outermost nodes are known.
LARGEST_EVERY = 64
# Trees that count against a new one at most and at least, and how they fade from step to step: a rare tree says more.
MEMORY, PRIOR, FADING = 200.0, 4.0, 0.99
# Steps after which the same load is fitted anew: it takes as long as a few of a small model's operations.
FIT_EVERY = 4
# Plain steps have to be so much faster, foretold, to be preferred.
MARGIN = 1.02


class TreeSize(NamedTuple):
    """What rows get of a step.

    Attributes:
        nodes: of each tree at most.
        trees: rows that get one, all that can or a single one.
    """

    nodes: int
    trees: int


class DraftWorth:
    """Fits trees to the load: as many nodes per row as bring the most tokens a second.

    With S rows that yield a token, D of them able to draft, T known tokens, and v_i the chance that a tree's node of
    rank i, by its drafter's own estimate, is on the accepted path, n nodes a row are worth

        (S + D (v_1 + ... + v_n)) / (pass(T + D n) + draft(D trees of at most n levels))

    v is counted as the engine runs; pass and draft are measured. (Design section 5, with the values of ranks in place
    of those of single nodes, so that the choice is made before anything is drafted and a plain step drafts nothing.)

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
        self._best = (0, 0.0)
        self._other = 0
        self._learnt = 0
        self._sizes = sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if n < shape.nodes})
        self._sizes.append(shape.nodes)

    def size(self, sampled: int, known: int, drafting: int) -> TreeSize:
        """Trees for a step; none where plain steps are as good.

        Every now and then a step is of the other kind, so that what is known of both stays true: the less there is
        between them, the sooner.

        Args:
            sampled: rows that yield a token.
            known: tokens of the step without drafts.
            drafting: rows that can draft.
        """
        if drafting == 0:
            return TreeSize(0, 0)
        load = (sampled, known, drafting)
        if load != self._load or self._steps % FIT_EVERY == 0:
            self._load, self._best = load, self._fit(*load)
        best, gain = self._best
        self._steps += 1
        if self._steps % LARGEST_EVERY == 0:
            return TreeSize(self.shape.nodes, 1)
        repays = gain * MARGIN > 1
        if self._steps - self._other >= (OTHER_EVERY if 1 / CLOSE < gain < CLOSE else OTHER_SELDOM):
            self._other = self._steps
            repays = not repays
        return TreeSize(best, drafting) if repays else TreeSize(0, 0)

    def _fit(self, sampled: int, known: int, drafting: int) -> tuple[int, float]:
        """The best number of nodes from 1 on, and how many times the tokens a second of plain steps it brings."""
        plain = sampled / max(self.cost.step(sampled, known, 0, 0), 1e-9)
        best, best_rate = 0, 0.0
        gain, rank = 0.0, 0
        for size in self._sizes:
            while rank < size:
                gain += self.values[rank]
                rank += 1
            seconds = self.cost.step(sampled, known + drafting * size, drafting, min(size, self.shape.depth))
            rate = (sampled + drafting * gain) / max(seconds, 1e-9)
            if rate > best_rate:
                best, best_rate = size, rate
        return best, best_rate / plain

    def learn(self, outcomes: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Take in how trees have fared.

        Args:
            outcomes: per tree its number of nodes, and the ranks of those accepted.
        """
        fading = FADING ** (self._steps - self._learnt)
        self._learnt = self._steps
        self._seen = [max(PRIOR, seen * fading) for seen in self._seen]
        hits = [0] * self.shape.nodes
        trees = [0] * (self.shape.nodes + 1)
        for size, ranks in outcomes:
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
