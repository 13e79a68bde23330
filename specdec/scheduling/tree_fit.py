"""Prediction of the trees that yield most tokens per second at a load. Pure Python."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from specdec.core.draftable_row import DraftableRow
from specdec.scheduling.rank_values import RankValues
from specdec.scheduling.step_cost import StepCost

# Upper bound of a node's acceptance probability, whatever a request's history says.
SUREST = 0.9
# Sizes that are compared, besides the largest.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Tokens of a row over which the cost of reading its text is spread; an output may end sooner.
HORIZON = 128
# No node has such a value.
OUT_OF_REACH = 2.0
# A predicted time of 0 would make any rate infinite.
LEAST_SECONDS = 1e-9


class ChainFit(NamedTuple):
    """Nodes of chains in a step: their number, the tokens that they are predicted to yield, and the least value."""

    nodes: int
    tokens: float
    least_value: float


class TreeFit(NamedTuple):
    """Best trees at a load.

    Attributes:
        nodes: of each tree, at least 1.
        trees: number of rows that have one.
        least_ratio: the lowest ratio of these rows' acceptance histories; 0 if all rows have a tree.
        gain: tokens per second over those of a step without trees.
        cycle_cost: seconds over those of a step without trees.
    """

    nodes: int = 0
    trees: int = 0
    least_ratio: float = 0.0
    gain: float = 0.0
    cycle_cost: float = 0.0


def fit_chains(
    cost: StepCost, sampled: int, known: int, rows: Sequence[DraftableRow], *, is_optimistic: bool = False
) -> ChainFit:
    """Return the nodes of chains that yield most tokens per second where the model drafts nothing.

    Args:
        sampled: rows that yield a token.
        known: tokens of the step without drafts.
        rows: those that have chains, and others.
        is_optimistic: whether a node costs what it did when costs were measured at start, whatever has made plain steps
            longer since, such as masks of structured outputs.
    """
    values = sorted(chain.from_iterable([row.chains for row in rows]), reverse=True)
    if not values:
        return ChainFit(0, 0.0, 0.0)
    plain = cost.step(sampled, known, 0, 0)
    best, best_rate = ChainFit(0, 0.0, OUT_OF_REACH), sampled / max(plain, LEAST_SECONDS)
    sums = [0.0, *accumulate(values)]
    size = 1
    while True:
        if is_optimistic:
            seconds = plain + cost.passes(known + size) - cost.passes(known)
        else:
            seconds = cost.step(sampled, known + size, 0, 0)
        rate = (sampled + sums[size]) / max(seconds, LEAST_SECONDS)
        if rate > best_rate:
            best, best_rate = ChainFit(size, sums[size], values[size - 1]), rate
        if size == len(values):
            return best
        size = min(size + 1 + size // 10, len(values))


class TreeFitter:
    """Compares trees of all sizes, for all rows and for the most promising ones.

    For n nodes per tree the prediction of a step's tokens per second is

        (S + r (D_1 v_1 + ... + D_n v_n)) / (pass(T + D_1 d_1 + ... + D_n d_n) + draft(D_1 trees of at most n levels))

    S rows yield a token, D_i of those that draft may draft i nodes or more, and T is the number of known tokens. d_i is
    the probability that such a tree has a node of rank i, since a drafter may stop earlier, and v_i that it has one
    that is accepted. r is the acceptance of these rows' own trees relative to
    the average. Chains are part of S and T. The model's values in a row with chains are
    multiplied by the row's `share`. The time in which the head reads the rows' text is spread over what they yield.

    Args:
        nodes: limit of a tree's nodes.
    """

    def __init__(self, cost: StepCost, ranks: RankValues, nodes: int) -> None:
        self.cost, self.ranks = cost, ranks
        self._sizes = [*(size for size in SIZES if size < nodes), nodes]

    def fit(self, sampled: int, known: int, rows: Sequence[DraftableRow], chains: ChainFit) -> TreeFit:
        """Return the trees of at least one node that bring most tokens per second.

        Args:
            sampled: rows that yield a token.
            known: tokens of the step without drafts.
            rows: those for which the model can draft.
            chains: nodes that are verified besides.
        """
        ordered = sorted(rows, key=lambda row: -row.history.ratio)
        best = self._fit(sampled, known, ordered, chains, self._sizes)
        if ordered[0].history.ratio == ordered[-1].history.ratio:
            return best
        # Trees of this size for half of the rows, a quarter and so on; then all sizes for the best number of rows.
        fewer, sizes = len(ordered) // 2, [best.nodes]
        while fewer:
            other = self._fit(sampled, known, ordered[:fewer], chains, sizes)
            if other.gain > best.gain:
                best = other
            fewer //= 2
        if best.trees == len(ordered):
            return best
        best = self._fit(sampled, known, ordered[: best.trees], chains, self._sizes)
        return best._replace(least_ratio=ordered[best.trees - 1].history.ratio)

    def reading_share(self, rows: Sequence[DraftableRow]) -> float:
        """Return the seconds of reading what the draft head has not read, per token that a row yields later."""
        ahead = [row.ahead() for row in rows]
        seconds = self.cost.reading(sum(each.unread for each in ahead))
        left = sum(min(each.left, HORIZON) for each in ahead) / len(rows)
        return seconds / max(left, 1.0)

    def _fit(
        self, sampled: int, known: int, rows: Sequence[DraftableRow], chains: ChainFit, sizes: Sequence[int]
    ) -> TreeFit:
        """Return the best of these sizes if the model drafts for these rows."""
        values, drafted = self.ranks.values, self.ranks.drafted
        tokens, known = sampled + chains.tokens, known + chains.nodes
        bounds = sorted(row.nodes for row in rows if row.share == 1)
        depth, ratio = max(row.depth for row in rows), sum(row.history.ratio for row in rows) / len(rows)
        reading = self.reading_share(rows)
        shared = [row for row in rows if row.share < 1]
        plain_seconds = max(self.cost.step(sampled, known, 0, 0), LEAST_SECONDS)
        best, best_rate, best_seconds = 0, 0.0, 0.0
        value, nodes, rank = 0.0, 0.0, 0
        for size in sizes:
            while rank < size:
                # Rows whose trees may have a node of this rank.
                able = len(bounds) - bisect_right(bounds, rank)
                value += able * min(ratio * values[rank], SUREST)
                nodes += able * drafted[rank]
                rank += 1
            more_value, more_nodes, trees = 0.0, 0.0, len(bounds)
            for row in shared:
                own = self.ranks.num_drafted(row.share, min(size, row.nodes))
                more_value += row.share * sum(min(ratio * value, SUREST) for value in values[:own])
                more_nodes += sum(drafted[:own])
                trees += own > 0
            seconds = self.cost.step(sampled, known + nodes + more_nodes, trees, min(size, depth))
            seconds += reading * (1 + (value + more_value) / len(rows))
            rate = (tokens + value + more_value) / max(seconds, LEAST_SECONDS)
            if rate > best_rate:
                best, best_rate, best_seconds = size, rate, seconds
        best = min(best, max(row.nodes for row in rows))
        return TreeFit(best, len(rows), 0.0, best_rate * plain_seconds / tokens, best_seconds / plain_seconds)
