"""Acceptance rates of draft nodes by rank. Pure Python."""

import json
from collections.abc import Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from typing import NamedTuple

from specdec.core.draftable_row import AcceptanceHistory

# File beside a head's weights with the values of ranks measured before.
FILE = "rank_values.json"
# Upper and lower bound of the number of trees that a new one is averaged with, and its decay per step: after a pause, a
# tree counts for more.
MEMORY, PRIOR, FADING = 200.0, 6.0, 0.995
# Trees that values learnt before stand for.
LEARNT = 16.0


class TreeOutcome(NamedTuple):
    """Verification of one tree, as far as the draft model drafted it.

    Attributes:
        granted: nodes that it could have; a drafter stops earlier where deeper nodes are unlikely.
        nodes: number of its nodes.
        ranks: ranks of the accepted nodes, 0 for the most valuable one.
        history: acceptance history of its request.
    """

    granted: int
    nodes: int
    ranks: Sequence[int]
    history: AcceptanceHistory


class RankValues:
    """Values of the nodes of each rank in their trees.

    Args:
        nodes: limit of a tree's nodes.
        prior: values of ranks learnt before; ranks behind them, or all without a prior, begin with a guess.

    Attributes:
        values: share of the trees that could have a node of this rank in which there is one and it is accepted.
        drafted: share of these trees in which there is one.
    """

    def __init__(self, nodes: int, prior: Sequence[float] = ()) -> None:
        least = prior[-1] if prior else 1.0
        self.values = [*prior[:nodes], *(min(value, least) for value in first_values(nodes)[len(prior) :])]
        self.drafted = [1.0] * nodes
        self._seen = [LEARNT] * min(nodes, len(prior)) + [PRIOR] * (nodes - len(prior))
        self._learnt = 0

    def num_drafted(self, share: float, nodes: int) -> int:
        """Return how many nodes the model drafts for a row whose chains leave this share of their values.

        They are worth at least as much as the last of the `nodes` that a row without chains gets.
        """
        if share == 1 or not nodes:
            return nodes
        least = min(self.values[:nodes])
        return sum(1 for _ in takewhile(lambda value: share * value >= least, self.values[:nodes]))

    def learn(self, outcomes: Sequence[TreeOutcome], step: int) -> None:
        """Update the means, and the requests' histories.

        Args:
            step: number of the step, which tells how long ago the last outcomes were.
        """
        size = len(self.values)
        fading = FADING ** (step - self._learnt)
        self._learnt = step
        hits, trees, whole = [0] * size, [0] * (size + 1), [0] * (size + 1)
        predicted = [0.0, *accumulate(self.values)]
        for granted, nodes, ranks, history in outcomes:
            history.learn(len(ranks), predicted[granted])
            whole[granted] += 1
            trees[nodes] += 1
            for rank in ranks:
                hits[rank] += 1
        known, values, in_trees = self._seen, self.values, self.drafted
        granted = drafted = 0
        # Conditions in place of `min` and `max`: this runs over all ranks, and in each step.
        for rank in range(size - 1, -1, -1):
            # Number of trees that could have a node of this rank, and that have one.
            granted += whole[rank + 1]
            drafted += trees[rank + 1]
            seen = known[rank] * fading
            seen = (seen if seen > PRIOR else PRIOR) + granted
            known[rank] = seen = seen if seen < MEMORY else MEMORY
            if granted:
                share = granted / seen if granted < seen else 1.0
                values[rank] += share * (hits[rank] / granted - values[rank])
                in_trees[rank] += share * (drafted / granted - in_trees[rank])


def first_values(nodes: int) -> list[float]:
    """Return the values of ranks before any tree is verified."""
    return [0.7 / (1 + 0.5 * rank) for rank in range(nodes)]


def read_values(folder: Path) -> list[float]:
    """Return the values of ranks in a head's folder, empty if it has none.

    Raises:
        ValueError: a file that holds no such values.
    """
    file = folder / FILE
    if not file.is_file():
        return []
    try:
        values = json.loads(file.read_text(encoding="utf-8"))["values"]
        if not all(isinstance(value, int | float) and 0 <= value <= 1 for value in values):
            raise ValueError("values outside 0 to 1")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: holds no values of ranks ({type(error).__name__}: {error}); write it anew by "
            "`specdec profile --save`, or remove it"
        ) from None
    return [float(value) for value in values]


def write_values(values: Sequence[float], folder: Path) -> Path:
    """Write the values of ranks beside a head's weights; return the file."""
    file = folder / FILE
    file.write_text(json.dumps({"values": [round(value, 3) for value in values]}) + "\n", encoding="utf-8")
    return file
