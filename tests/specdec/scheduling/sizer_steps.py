"""Tree sizers on machines with given costs, rows for them, and steps in which nodes are accepted by chance."""

import random

from specdec.core.draftable_row import AcceptanceHistory, DraftableRow
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.rank_values import TreeOutcome
from specdec.scheduling.step_cost import Curve, StepCost
from specdec.scheduling.tree_sizer import TreeSize, TreeSizer
from tests.specdec.scheduling.scheduled_steps import plain_known

SHAPE = DraftShape(4, 4, 16)


def make(token: float, level: float, shape: DraftShape = SHAPE, num_first: int = 0, unit: float = 1.0) -> TreeSizer:
    """A machine on which a pass takes 1 and `token` per token, and drafting `level` per level and tree, in units."""
    passes = Curve([(1, unit * (1.0 + token)), (1001, unit * (1.0 + 1001 * token))])
    first, every = (Curve([(1, unit * n * level), (101, unit * 101 * n * level)]) for n in (1, shape.depth))
    cost = plain_known(StepCost(passes, first_level=first, all_levels=every, depth=shape.depth))
    return TreeSizer(cost, shape, num_first)


def row(history: AcceptanceHistory, nodes: int = SHAPE.nodes, depth: int = SHAPE.depth) -> DraftableRow:
    return DraftableRow(history, nodes, depth)


def usual(rows: int, nodes: int = SHAPE.nodes, depth: int = SHAPE.depth) -> list[DraftableRow]:
    """Return rows whose acceptance is average."""
    return [row(AcceptanceHistory(1.0, 1.0), nodes, depth) for _ in range(rows)]


def simulate(worth: TreeSizer, chance: random.Random, true: list[float], steps: int, rows: int = 4) -> list[TreeSize]:
    """Steps of a world in which nodes are accepted by `true`, and costs are as predicted."""
    sizes, records = [], usual(rows)
    for _ in range(steps):
        size = worth.size(rows, rows, records)
        ranks = [[r for r in range(size.nodes) if chance.random() < true[r]] for _ in range(size.trees)]
        if size.nodes:
            pairs = zip(ranks, records, strict=False)
            worth.learn([TreeOutcome(size.nodes, size.nodes, own, record.history) for own, record in pairs])
        sizes.append(size)
    return sizes
