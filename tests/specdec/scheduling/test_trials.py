"""Trials: now and then some steps are of the kind that is not chosen, so that costs and values stay up to date."""

import random
from itertools import pairwise

import pytest

from specdec.scheduling.rank_values import TreeOutcome
from specdec.scheduling.step_cost import Curve, MeasuredStep, Ratios, StepCost
from specdec.scheduling.tree_sizer import (
    CHAINS_EVERY,
    LARGEST_EVERY,
    LONE,
    LONE_OF_ONE,
    PLAIN,
    PLAIN_EVERY,
    PLAIN_FIRST,
    PLAIN_SECONDS,
    TRIALS,
    TreeSize,
    TreeSizer,
)
from tests.specdec.scheduling.sizer_steps import SHAPE, make, simulate, usual

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("true", [[0.05] * 16, [0.9] + [0.3] * 15])
def test_a_run_of_plain_steps_goes_on_without_a_choice_and_with_the_same_outcome(
    rows: int, true: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the next fit or trial of drafts, steps of the same rows are plain, whether the sizer is asked or not."""
    monkeypatch.setattr("specdec.scheduling.tree_sizer.FIT_SECONDS", 10.0)
    asked, unasked = make(token=0.1, level=0.1), make(token=0.1, level=0.1)
    skipped, records, twins = 0, usual(rows), usual(rows)
    for step in range(600):
        size = asked.size(rows, rows, records)
        if unasked.goes_on_plainly(rows):
            skipped += 1
            assert size == TreeSize(0, 0)
        else:
            assert unasked.size(rows, rows, twins) == size
        ranks = [rank for rank in range(size.nodes) if random.Random(f"{step} {rank}").random() < true[rank]]
        for sizer, mine in ((asked, records), (unasked, twins)) if size.nodes else ():
            sizer.learn([TreeOutcome(size.nodes, size.nodes, ranks, row.history) for row in mine[: size.trees]])
    assert not unasked.goes_on_plainly(rows + 1)
    assert skipped > 400 or max(true) > 0.1


def test_one_disturbed_step_does_not_end_trees() -> None:
    """The first step that is measured takes nine times as long as it should; the next ones tell."""
    sizer, records = make(token=0.001, level=0.01), usual(4)
    cost, sizes = sizer.cost, list[TreeSize]()
    cost.checking = Ratios()
    for _ in range(40):
        size = sizer.size(4, 4, records)
        tokens, levels = 4 + size.trees * size.nodes, min(size.nodes, SHAPE.depth)
        # That of the first step counts for nothing.
        factor = 9.0 if sum(each.nodes > 0 for each in sizes) == 1 else 1.0
        seconds = factor * (cost.passes(tokens) + cost.rows(4))
        draft = sizer.cost.draft(size.trees, levels)
        cost.correct(MeasuredStep(4, tokens, 0, seconds, size.trees, levels, size.trees, draft))
        sizes.append(size)
    assert sum(size.nodes > 0 for size in sizes) >= 38
    # What always takes so long is given up soon.
    slow, records = make(token=0.001, level=0.01), usual(4)
    slow.cost.checking, sizes = Ratios(), []
    for _ in range(40):
        size = slow.size(4, 4, records)
        tokens = 4 + size.trees * size.nodes
        seconds = (9.0 if size.nodes else 1.0) * (slow.cost.passes(tokens) + slow.cost.rows(4))
        slow.cost.correct(MeasuredStep(4, tokens, 0, seconds, size.trees, 1, size.trees, 0.01))
        sizes.append(size)
    assert all(size.nodes == 0 for size in sizes[10:26])


@pytest.mark.long
def test_a_bad_head_is_given_up_and_a_better_text_is_noticed() -> None:
    worth, chance = make(token=0.05, level=0.02), random.Random(2)
    bad = simulate(worth, chance, [0.01] * 16, 1000)
    assert sum(size.nodes > 0 for size in bad[-500:]) < 60
    good = simulate(worth, chance, [0.9, 0.8, 0.7, 0.6] + [0.05] * 12, 4000)
    assert sum(size.nodes >= 4 for size in good[-500:]) > 400


def trials(sizes: list[TreeSize], other: bool) -> list[int]:
    """Return the steps at which trials begin, of steps with trees or of others."""
    kinds = [(size.nodes > 0) is other for size in sizes]
    return [step for step in range(1, len(kinds)) if kinds[step] and not kinds[step - 1]]


@pytest.mark.long
@pytest.mark.parametrize(("rows", "unit", "steps"), [(1, 1.0, 1), (4, 1.0, 1), (1, PLAIN_SECONDS / 50, PLAIN)])
def test_plain_steps_are_tried_now_and_then(rows: int, unit: float, steps: int) -> None:
    """Soon after trees begin, then as often as trials cost their share of the time. Large models need one step."""
    sizer = make(token=0.0001, level=0.0001, unit=unit)
    sizes = simulate(sizer, random.Random(3), [0.9] * 16, 6000, rows)
    begins = trials(sizes, False)
    outlook = sizer.outlook
    assert outlook is not None
    share = max(PLAIN_EVERY, int(steps * (1 - outlook.cycle_cost / outlook.tau) / outlook.cycle_cost / TRIALS))
    every, trees = [], PLAIN_FIRST
    while sum(every) < 6000:
        every.append(min(trees, share) + steps)
        trees *= 2
    assert len(begins) == pytest.approx(len(every) - 1, abs=1)
    gaps = [after - before for before, after in pairwise(begins)]
    assert gaps == pytest.approx(every[1 : len(begins)], rel=0.05)
    assert sum(size.nodes == 0 for size in sizes[begins[0] :]) <= len(begins) * steps
    # The outermost nodes are learnt of now and then.
    lone = [size for size in sizes if size[:2] == (16, 1)]
    assert rows == 1 or 35 <= len(lone) <= 6000 // LARGEST_EVERY
    assert rows == 1 or len({size.turn for size in lone}) == len(lone)


@pytest.mark.long
@pytest.mark.parametrize(("rows", "steps"), [(1, LONE_OF_ONE), (4, LONE)])
def test_lone_trees_are_tried_where_plain_steps_are_faster(rows: int, steps: int) -> None:
    """As often as they cost their share of the time; the trees of a trial are all one row's."""
    sizer = make(token=1.0, level=1.0)
    sizes = simulate(sizer, random.Random(3), [0.1] * 16, 20000, rows)
    begins = trials(sizes, True)
    assert len(begins) >= 5
    tried = [size for size in sizes if size.nodes]
    assert len(tried) == len(begins) * steps
    assert all(size.trees == 1 for size in tried)
    assert len({size.turn for size in tried}) == len(begins)
    lost = sum(
        sizer.cost.step(rows, rows + size.nodes, 1, min(size.nodes, SHAPE.depth)) - sizer.cost.step(rows, rows, 0, 0)
        for size in tried
    )
    assert lost <= 1.1 * TRIALS * 20000 * sizer.cost.step(rows, rows, 0, 0)


@pytest.mark.parametrize("share", [0.2, 2.0])
def test_chains_are_tried_where_only_plain_steps_are_known(share: float) -> None:
    """Masks of structured outputs triple a small model's plain step, but add little per node: forced text was left.

    Each node takes a share of a plain pass. Where it takes too long, few steps find out.
    """
    passes = Curve([(1, 0.010), (2, 0.022), (9, 0.106)])
    cost = StepCost(passes)
    sizer, row, chained = TreeSizer(cost, SHAPE, 0), usual(1, 0)[0]._replace(chains=[0.98]), []
    for _ in range(10 * CHAINS_EVERY):
        size = sizer.size(1, 1, [row])
        chained.append(size.least_value <= 0.98)
        seconds = 3 * passes(1) + chained[-1] * share * 3 * passes(1)
        cost.correct(MeasuredStep(1, 1 + chained[-1], 0, seconds, 0, 0, 0, 0.0))
    if share < 1:
        assert all(chained[CHAINS_EVERY:])
    else:
        assert any(chained[:CHAINS_EVERY])
        assert sum(chained) <= 15
