"""Choice of the tree size that yields most tokens per second at the present load. Pure Python."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, takewhile
from typing import NamedTuple

from specdec.core.draftable_row import AcceptanceHistory, DraftableRow
from specdec.core.engine_stats import DraftOutlook
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.step_cost import StepCost

# Where trees pay: steps with trees before the next trial of plain ones, and plain steps of that trial. Where they do
# not: the same the other way round. The first plain steps, and a lone tree of a single row, are not representative.
PLAIN = (128, 10)
TREES, TREES_OF_ONE = (48, 2), (256, 4)
# A trial that changes nothing makes the time until the next one twice as long, up to this factor.
PATIENCE = 16
# Trees that are verified before the first choice. They are as large as allowed: before, there is nothing to learn from.
FIRST_TREES = 8
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
        nodes: limit of the nodes that the draft model drafts per tree.
        trees: number of rows that it drafts for.
        least_value: nodes of chains are verified if their value is at least this.
        least_ratio: the model drafts for rows whose acceptance history has at least this ratio.
    """

    nodes: int
    trees: int
    least_value: float = 0.0
    least_ratio: float = 0.0


class TreeOutcome(NamedTuple):
    """Verification of one tree, as far as the draft model drafted it.

    Attributes:
        nodes: number of its nodes.
        ranks: ranks of the accepted nodes, 0 for the node that its drafter found most probable.
        history: acceptance history of its request.
    """

    nodes: int
    ranks: Sequence[int]
    history: AcceptanceHistory


class _Fit(NamedTuple):
    """Best trees at a load.

    Attributes:
        nodes: of each tree, at least 1.
        trees: number of rows that have one.
        least_ratio: the lowest ratio of these rows' acceptance histories; 0 if all rows have a tree.
        gain: tokens per second over those of a step without trees.
        cycle_cost: seconds over those of a step without trees.
    """

    nodes: int
    trees: int
    least_ratio: float
    gain: float
    cycle_cost: float


class _Chains(NamedTuple):
    """Nodes of chains in a step: their number, the tokens that they are predicted to yield, and the least value."""

    nodes: int
    tokens: float
    least_value: float


# No node has such a value.
OUT_OF_REACH = 2.0


def first_values(nodes: int) -> list[float]:
    """Return the values of ranks before any tree is verified."""
    return [0.7 / (1 + 0.5 * rank) for rank in range(nodes)]


class TreeSizer:
    """Adapts tree size to load.

    Each step uses the size predicted to maximise tokens per second, from measured step costs and observed acceptance
    rates. If drafting would not help, it is skipped. For n nodes per row the prediction is

        (S + r (D_1 v_1 + ... + D_n v_n)) / (pass(T + D_1 + ... + D_n) + draft(D_1 trees of at most n levels))

    S rows yield a token, D_i of those that draft may draft i nodes or more, and T is the number of known tokens. v_i is
    the probability that a tree's node of rank i is accepted, ranked by the drafter's own estimate. r is the acceptance
    of these rows' own trees relative to the average. v and r are observed as the engine runs, pass and draft are
    measured. Values belong to ranks and not to single nodes, so that the choice precedes drafting and a plain step
    drafts nothing. Rows draft if their r is high enough for their trees to repay.

    Chains cost no drafting and have values of their own. Their nodes are chosen first, the most valuable of all rows,
    as many as maximise tokens per second without the model. S and T above include them. The model's values in a row
    with chains are multiplied by the row's `share`.

    Attributes:
        num_first: trees that are still to be verified before the first choice.
    """

    def __init__(self, cost: StepCost, shape: DraftShape, num_first: int = FIRST_TREES) -> None:
        self.cost, self.shape = cost, shape
        self.values = first_values(shape.nodes)
        self._seen = [PRIOR] * shape.nodes
        self._steps = 0
        self._load: tuple[object, ...] | None = None
        self._best = _Fit(0, 0, 0.0, 0.0, 0.0)
        self.num_first = num_first
        # Number of the step in which the size is computed anew, and of that up to which the same rows decode plainly.
        self._next_fit, self._plain_until = 0, 0
        # Whether steps have trees, the number of steps since that changed or the other kind was tried, and the factor
        # of the time until it is tried next.
        self._drafts, self._alike, self._patience = False, 0, 1
        self._learnt = 0
        self._sizes = sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if n < shape.nodes})
        self._sizes.append(shape.nodes)

    def goes_on_plainly(self, sampled: int) -> bool:
        """Return whether another step of a run of plain ones needs no choice, and count it if so.

        Args:
            sampled: rows that yield a token, none of them with chains.
        """
        if self._steps >= self._plain_until or self._load is None or sampled != self._load[0]:
            return False
        self._steps += 1
        self._alike += 1
        return True

    def size(self, sampled: int, known: int, rows: Sequence[DraftableRow]) -> TreeSize:
        """Choose the trees of a step, none if plain steps are as fast.

        Now and then some steps are of the other kind, so that the costs of both stay up to date.

        Args:
            sampled: rows that yield a token.
            known: tokens of the step without drafts.
            rows: those that may draft, or have chains.
        """
        chains = self._fit_chains(sampled, known, rows)
        size = self._size_drafted(sampled, known, [row for row in rows if row.nodes], chains)
        return size._replace(least_value=chains.least_value)

    def _size_drafted(self, sampled: int, known: int, rows: Sequence[DraftableRow], chains: _Chains) -> TreeSize:
        """Choose what the draft model drafts."""
        drafting, self._plain_until = len(rows), 0
        if drafting == 0:
            return TreeSize(0, 0)
        if self.num_first > 0:
            self._steps += 1
            return TreeSize(self.shape.nodes, drafting)
        _, nodes, depths, _, shares = zip(*rows, strict=True)
        bounds, shared = sorted(nodes), [round(share, 1) for share in shares if share < 1]
        load = sampled, known, max(depths), bounds, chains.nodes, round(chains.tokens, 1), shared
        if load != self._load or self._steps >= self._next_fit:
            self._load, self._best = load, self._fit(sampled, known, rows, chains)
            plain = self.cost.step(sampled, known, 0, 0)
            self._next_fit = self._steps + max(1, min(FIT_STEPS, int(FIT_SECONDS / max(plain, 1e-9))))
        best = self._best
        self._steps += 1
        if self._drafts != (best.gain * MARGIN > 1 if self._drafts else best.gain > MARGIN):
            self._drafts, self._alike, self._patience = not self._drafts, 0, 1
        if self._drafts:
            every, run = PLAIN
        else:
            every, run = TREES_OF_ONE if sampled == 1 else TREES
        every *= self._patience
        self._alike += 1
        if self._alike >= every + run:
            self._alike, self._patience = 0, min(2 * self._patience, PATIENCE)
        if not self._drafts and self._alike < every:
            self._plain_until = min(self._next_fit, self._steps + every - 1 - self._alike)
        if self._drafts != (self._alike < every):
            return TreeSize(0, 0)
        if not self._drafts:
            # A trial shows what all rows accept.
            return TreeSize(best.nodes, drafting)
        if self._steps % LARGEST_EVERY == 0:
            return TreeSize(bounds[-1], 1)
        return TreeSize(best.nodes, best.trees, least_ratio=best.least_ratio)

    def _fit_chains(self, sampled: int, known: int, rows: Sequence[DraftableRow]) -> _Chains:
        """Return the nodes of chains that yield most tokens per second where the model drafts nothing."""
        values = sorted(chain.from_iterable([row.chains for row in rows]), reverse=True)
        if not values:
            return _Chains(0, 0.0, 0.0)
        best, best_rate = _Chains(0, 0.0, OUT_OF_REACH), sampled / max(self.cost.step(sampled, known, 0, 0), 1e-9)
        sums = [0.0, *accumulate(values)]
        size = 1
        while True:
            rate = (sampled + sums[size]) / max(self.cost.step(sampled, known + size, 0, 0), 1e-9)
            if rate > best_rate:
                best, best_rate = _Chains(size, sums[size], values[size - 1]), rate
            if size == len(values):
                return best
            size = min(size + 1 + size // 4, len(values))

    @property
    def outlook(self) -> DraftOutlook | None:
        """Prediction for steps with trees at the last load, None before the first choice."""
        if self._load is None:
            return None
        return DraftOutlook(self._drafts, self._best.cycle_cost, self._best.gain * self._best.cycle_cost)

    def _fit(self, sampled: int, known: int, rows: Sequence[DraftableRow], chains: _Chains) -> _Fit:
        """Return the trees of at least one node that bring most tokens per second.

        Args:
            rows: those for which the model can draft.
            chains: nodes that are verified besides.
        """
        ordered = sorted(rows, key=lambda row: -row.history.ratio)
        best = self._fit_size(sampled, known, ordered, chains, self._sizes)
        fewer, sizes = len(ordered) // 2, [best.nodes]
        if ordered[0].history.ratio == ordered[-1].history.ratio:
            return best
        # Fewer rows of this size, and then the best size for so many.
        while fewer:
            fit = self._fit_size(sampled, known, ordered[:fewer], chains, sizes)
            if fit.gain > best.gain:
                best = fit
            fewer //= 2
        if best.trees == len(ordered):
            return best
        best = self._fit_size(sampled, known, ordered[: best.trees], chains, self._sizes)
        return best._replace(least_ratio=ordered[best.trees - 1].history.ratio)

    def _fit_size(
        self, sampled: int, known: int, rows: Sequence[DraftableRow], chains: _Chains, sizes: Sequence[int]
    ) -> _Fit:
        """Return the best of these sizes if the model drafts for these rows, highest ratio first."""
        tokens, known = sampled + chains.tokens, known + chains.nodes
        bounds = sorted(row.nodes for row in rows if row.share == 1)
        depth, ratio = max(row.depth for row in rows), sum(row.history.ratio for row in rows) / len(rows)
        shared = [row for row in rows if row.share < 1]
        plain_seconds = max(self.cost.step(sampled, known, 0, 0), 1e-9)
        best, best_rate, best_seconds = 0, 0.0, 0.0
        value, nodes, rank = 0.0, 0, 0
        for size in sizes:
            while rank < size:
                # Rows whose trees may have a node of this rank.
                able = len(bounds) - bisect_right(bounds, rank)
                value += able * min(ratio * self.values[rank], SUREST)
                nodes += able
                rank += 1
            more_value, more_nodes, trees = 0.0, 0, len(bounds)
            for row in shared:
                own = self.num_drafted(row.share, min(size, row.nodes))
                more_value += row.share * sum(min(ratio * value, SUREST) for value in self.values[:own])
                more_nodes += own
                trees += own > 0
            seconds = self.cost.step(sampled, known + nodes + more_nodes, trees, min(size, depth))
            rate = (tokens + value + more_value) / max(seconds, 1e-9)
            if rate > best_rate:
                best, best_rate, best_seconds = size, rate, seconds
        best = min(best, max(row.nodes for row in rows))
        return _Fit(best, len(rows), 0.0, best_rate * plain_seconds / tokens, best_seconds / plain_seconds)

    def num_drafted(self, share: float, nodes: int) -> int:
        """Return how many nodes the model drafts for a row whose chains leave this share of their values.

        They are worth at least as much as the last of the `nodes` that a row without chains gets.
        """
        if share == 1 or not nodes:
            return nodes
        least = min(self.values[:nodes])
        return sum(1 for _ in takewhile(lambda value: share * value >= least, self.values[:nodes]))

    def learn(self, outcomes: Sequence[TreeOutcome]) -> None:
        """Update the values of ranks and the requests' histories."""
        self.num_first -= len(outcomes)
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
