"""Trees as large as they repay."""

import random

from hypothesis import given
from hypothesis import strategies as st

from specdec.curve import Curve
from specdec.draft_heads.draft_shape import DraftShape
from specdec.draft_worth import LARGEST_EVERY, DraftWorth, TreeSize
from specdec.step_cost import StepCost

SHAPE = DraftShape(4, 4, 16)


def make(token: float, level: float, shape: DraftShape = SHAPE) -> DraftWorth:
    """A machine on which a pass takes 1 and `token` per token, and drafting `level` per level and tree."""
    passes = Curve([(1, 1.0 + token), (1001, 1.0 + 1001 * token)])
    first, every = (Curve([(1, n * level), (101, 101 * n * level)]) for n in (1, shape.depth))
    return DraftWorth(StepCost(passes, first_level=first, all_levels=every, depth=shape.depth), shape)


def rate(worth: DraftWorth, rows: int, nodes: int) -> float:
    seconds = worth.cost.step(rows, rows * (1 + nodes), rows if nodes else 0, min(nodes, worth.shape.depth))
    return rows * (1 + sum(worth.values[:nodes])) / seconds


@given(st.floats(0.0001, 0.5), st.floats(0.0001, 0.5), st.integers(1, 64), st.lists(st.floats(0, 1), min_size=16))
def test_no_other_size_brings_more(token: float, level: float, rows: int, values: list[float]) -> None:
    worth = make(token, level)
    worth.values = sorted(values[:16], reverse=True)
    chosen = worth.size(rows, rows, rows)
    best = max((1, 2, 3, 4, 6, 8, 12, 16), key=lambda nodes: rate(worth, rows, nodes))
    if chosen.nodes:
        assert chosen == TreeSize(chosen.nodes, rows)
        assert rate(worth, rows, chosen.nodes) >= rate(worth, rows, best) * (1 - 1e-9)
        assert rate(worth, rows, chosen.nodes) > 0.97 * rate(worth, rows, 0)
    else:
        assert rate(worth, rows, best) < rate(worth, rows, 0)


def test_free_drafts_are_taken_and_dear_ones_are_not() -> None:
    assert make(token=0.0001, level=0.0001).size(1, 1, 1) == TreeSize(16, 1)
    assert make(token=1.0, level=1.0).size(1, 1, 1) == TreeSize(0, 0)


def test_trees_shrink_as_the_load_grows() -> None:
    sizes = [make(token=0.01, level=0.001).size(rows, rows, rows).nodes for rows in (1, 4, 16, 64, 256)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 12
    assert sizes[-1] <= 1


def test_nothing_is_asked_where_nobody_can_draft() -> None:
    assert make(0.0001, 0.0001).size(5, 5, 0) == TreeSize(0, 0)


def test_outcomes_are_learnt_by_rank() -> None:
    worth, chance = make(0.01, 0.01), random.Random(1)
    true = [0.8, 0.5, 0.3, 0.1] + [0.02] * 12
    for _ in range(300):
        sizes = [chance.choice([4, 16]) for _ in range(4)]
        worth.learn([(size, [r for r in range(size) if chance.random() < true[r]]) for size in sizes])
    assert all(abs(value - expected) < 0.12 for value, expected in zip(worth.values, true, strict=True))


def test_ranks_that_no_tree_had_keep_their_values() -> None:
    worth = make(0.01, 0.01)
    before = list(worth.values)
    worth.learn([(3, [0, 2])] * 100)
    assert worth.values[3:] == before[3:]
    assert worth.values[0] > 0.9
    assert worth.values[1] < 0.1


def simulate(worth: DraftWorth, chance: random.Random, true: list[float], steps: int, rows: int = 4) -> list[TreeSize]:
    """Steps of a world in which nodes are accepted by `true`, and costs are as foretold."""
    sizes = []
    for _ in range(steps):
        size = worth.size(rows, rows, rows)
        trees = [(size.nodes, [r for r in range(size.nodes) if chance.random() < true[r]]) for _ in range(size.trees)]
        worth.learn([tree for tree in trees if tree[0]])
        sizes.append(size)
    return sizes


def test_a_bad_head_is_given_up_and_a_better_text_is_noticed() -> None:
    worth, chance = make(token=0.05, level=0.02), random.Random(2)
    bad = simulate(worth, chance, [0.01] * 16, 1000)
    assert sum(size.nodes > 0 for size in bad[-500:]) < 60
    good = simulate(worth, chance, [0.9, 0.8, 0.7, 0.6] + [0.05] * 12, 4000)
    assert sum(size.nodes >= 4 for size in good[-500:]) > 400


def test_both_kinds_of_steps_are_tried_now_and_then() -> None:
    worth, chance = make(token=0.0001, level=0.0001), random.Random(3)
    sizes = simulate(worth, chance, [0.9] * 16, 1000)
    plain = sum(size.nodes == 0 for size in sizes)
    assert 3 <= plain <= 20
    assert sum(size == TreeSize(16, 1) for size in sizes) == 1000 // LARGEST_EVERY
