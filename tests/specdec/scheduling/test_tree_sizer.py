"""Trees as large as they repay."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdec.core.draftable_row import AcceptanceHistory, Ahead, DraftableRow
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.rank_values import TreeOutcome
from specdec.scheduling.step_cost import Curve, MeasuredStep, StepCost
from specdec.scheduling.tree_fit import SUREST, ChainFit
from specdec.scheduling.tree_sizer import MARGIN, MOST_WAITED, TreeSize, TreeSizer
from tests.specdec.scheduling.sizer_steps import SHAPE, make, row, simulate, usual


def rate(worth: TreeSizer, rows: int, nodes: int) -> float:
    seconds = worth.cost.step(rows, rows * (1 + nodes), rows if nodes else 0, min(nodes, worth.shape.depth))
    return rows * (1 + sum(worth.ranks.values[:nodes])) / seconds


@given(st.floats(0.0001, 0.5), st.floats(0.0001, 0.5), st.integers(1, 64), st.lists(st.floats(0, SUREST), min_size=16))
def test_no_other_size_brings_more(token: float, level: float, rows: int, values: list[float]) -> None:
    worth = make(token, level)
    worth.ranks.values = sorted(values[:16], reverse=True)
    chosen = worth.size(rows, rows, usual(rows))
    best = max((1, 2, 3, 4, 6, 8, 12, 16), key=lambda nodes: rate(worth, rows, nodes))
    if chosen.nodes:
        assert chosen == TreeSize(chosen.nodes, rows)
        assert rate(worth, rows, chosen.nodes) >= rate(worth, rows, best) * (1 - 1e-9)
        assert rate(worth, rows, chosen.nodes) > rate(worth, rows, 0) * MARGIN * (1 - 1e-9)
    else:
        assert rate(worth, rows, best) <= rate(worth, rows, 0) * MARGIN * (1 + 1e-9)


def test_free_drafts_are_taken_and_dear_ones_are_not() -> None:
    assert make(token=0.0001, level=0.0001).size(1, 1, usual(1)) == TreeSize(16, 1)
    assert make(token=1.0, level=1.0).size(1, 1, usual(1)) == TreeSize(0, 0)


def test_plain_steps_of_so_many_rows_are_measured_before_trees_are_weighed_against_them() -> None:
    sizer = make(token=0.0001, level=0.0001)
    unknown = TreeSizer(StepCost(sizer.cost.passes, first_level=sizer.cost.first_level), SHAPE, num_first=0)
    for _ in range(5):
        assert unknown.size(4, 4, usual(4)) == TreeSize(0, 0)
    for _ in range(2):
        unknown.cost.correct(MeasuredStep(4, 4, 0, 1.0, 0, 0, 0, 0.0))
    assert unknown.size(4, 4, usual(4)) == TreeSize(16, 4)
    # Where each step computes a prompt, none can be measured.
    unknown = TreeSizer(StepCost(sizer.cost.passes, first_level=sizer.cost.first_level), SHAPE, num_first=0)
    # Steps that wait need not be asked for.
    assert unknown.goes_on_plainly(32)
    assert unknown.goes_on_plainly(32, mixed=True)
    sizes = [unknown.size(32, 32, usual(32), mixed=True) for _ in range(MOST_WAITED - 1)]
    assert [size.nodes for size in sizes] == [0] * (MOST_WAITED - 2) + [16]
    # Trees that pay go on where a prompt leaves fewer rows than were ever measured.
    assert unknown.size(2, 18, usual(2), mixed=True) == TreeSize(16, 2)


def test_steps_with_prompts_have_trees_if_the_others_do() -> None:
    """What trees cost there is not measured, so that a wrong prediction would last."""
    sizer = make(token=0.0001, level=0.0001)
    assert sizer.size(4, 4, usual(4), mixed=True) == TreeSize(0, 0)
    assert sizer.size(4, 4, usual(4)) == TreeSize(16, 4)
    assert sizer.size(4, 4, usual(4), mixed=True) == TreeSize(16, 4)
    sizer.ranks.values = [0.0] * 16
    assert sizer.size(4, 4, usual(4, nodes=15)) == TreeSize(0, 0)
    assert sizer.size(4, 4, usual(4), mixed=True) == TreeSize(0, 0)


def test_the_first_trees_of_a_single_row_are_fixed_whatever_they_cost() -> None:
    dear = make(token=1.0, level=1.0, num_first=3)
    assert dear.size(2, 2, usual(2)) == TreeSize(0, 0)
    for _ in range(3):
        assert dear.size(1, 1, usual(1)) == TreeSize(16, 1)
        dear.learn([TreeOutcome(16, 16, [], AcceptanceHistory())])
    assert dear.size(1, 1, usual(1)) == TreeSize(0, 0)
    # They come before plain steps are measured, and trees of several rows after.
    unknown = TreeSizer(StepCost(dear.cost.passes, first_level=dear.cost.first_level), SHAPE, num_first=1)
    assert not unknown.goes_on_plainly(1)
    assert unknown.size(1, 1, usual(1)) == TreeSize(16, 1)
    assert unknown.goes_on_plainly(2)


def test_the_outlook_is_what_the_choice_went_by() -> None:
    dear, cheap = make(token=0.6, level=0.6), make(token=0.0001, level=0.0001)
    for sizer, pays in ((dear, False), (cheap, True)):
        assert sizer.outlook is None
        sizer.size(1, 1, usual(1))
        outlook = sizer.outlook
        assert outlook is not None
        assert outlook.pays is pays
        best = max((1, 2, 3, 4, 6, 8, 12, 16), key=lambda nodes: rate(sizer, 1, nodes))
        cost = sizer.cost.step(1, 1 + best, 1, min(best, 4)) / sizer.cost.step(1, 1, 0, 0)
        assert outlook.cycle_cost == pytest.approx(cost)
        assert outlook.tau == pytest.approx(1 + sum(sizer.ranks.values[:best]))
        assert (outlook.tau > outlook.cycle_cost * MARGIN) is pays


def test_trees_shrink_as_the_load_grows() -> None:
    sizes = [make(token=0.01, level=0.001).size(rows, rows, usual(rows)).nodes for rows in (1, 4, 16, 64, 256)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 12
    assert sizes[-1] <= 1


def test_nothing_is_asked_where_nobody_can_draft() -> None:
    assert make(0.0001, 0.0001).size(5, 5, []) == TreeSize(0, 0)


def test_outcomes_are_learnt_by_rank() -> None:
    worth, chance = make(0.01, 0.01), random.Random(1)
    true = [0.8, 0.5, 0.3, 0.1] + [0.02] * 12
    for _ in range(300):
        sizes = [chance.choice([4, 16]) for _ in range(4)]
        ranks = [[r for r in range(size) if chance.random() < true[r]] for size in sizes]
        worth.learn([TreeOutcome(size, size, own, AcceptanceHistory()) for size, own in zip(sizes, ranks, strict=True)])
    assert all(abs(value - expected) < 0.12 for value, expected in zip(worth.ranks.values, true, strict=True))


def test_ranks_that_no_tree_had_keep_their_values() -> None:
    worth = make(0.01, 0.01)
    before = list(worth.ranks.values)
    worth.learn([TreeOutcome(3, 3, [0, 2], AcceptanceHistory())] * 100)
    assert worth.ranks.values[3:] == before[3:]
    assert worth.ranks.values[0] > 0.9
    assert worth.ranks.values[1] < 0.1


def test_nodes_that_a_drafter_does_not_draft_cost_and_bring_nothing() -> None:
    """It stops where deeper nodes are unlikely, so that larger trees are the same trees."""
    worth, history = make(0.01, 0.01), AcceptanceHistory()
    before = worth.size(4, 4, usual(4))
    assert before.nodes > 4
    for step in range(300):
        granted = 16 if step % 2 else 4
        worth.learn([TreeOutcome(granted, 3, [0, 1], history)] * 4)
    assert worth.ranks.drafted[:3] == pytest.approx([1.0] * 3)
    assert max(worth.ranks.drafted[3:] + worth.ranks.values[3:]) < 0.02
    fits = {nodes: worth._fitter._fit(4, 4, usual(4), ChainFit(0, 0.0, 0.0), [nodes]) for nodes in (3, 4, 16)}
    # Its passes are as large; only levels that are not drafted may still be expected.
    assert fits[4].gain == pytest.approx(fits[3].gain, rel=0.05)
    # Trees of which half have a node more bring and cost half of it.
    worth.learn([TreeOutcome(4, nodes, [0, 1, 2, 3][:nodes], history) for nodes in (3, 4)] * 400)
    assert worth.ranks.drafted[3] == pytest.approx(0.5, abs=0.05)
    assert worth.ranks.values[3] == pytest.approx(0.5, abs=0.05)


def quick(token: float, level: float, rows: int) -> StepCost:
    """The costs of `make` on a machine whose steps take milliseconds, those of so many plain rows measured."""
    cost = make(token, level, unit=0.001).cost
    for _ in range(10):
        cost.correct(MeasuredStep(rows, rows, 0, 0.001 * (1 + rows * token), 0, 0, 0, 0.0))
    return cost


def test_the_first_trees_are_judged_after_few_steps() -> None:
    """The values that a head ships may be those of other text."""
    cost = quick(token=0.01, level=0.01, rows=4)
    sizer = TreeSizer(cost, SHAPE, 0, [0.9] * 16)
    sizes = simulate(sizer, random.Random(0), [0.0] * 16, steps=7)
    assert sizes[0].nodes == 16
    assert sizes[-1].nodes == 0


def test_new_rows_are_judged_at_once() -> None:
    sizer = TreeSizer(quick(token=0.1, level=0.1, rows=2), SHAPE, 0)
    sizer.ranks.values = [0.7, 0.4, 0.2] + [0.0] * 13
    hard, usual_rows = [row(AcceptanceHistory(1.0, 9.0))] * 2, usual(2)
    for _ in range(8):
        sizer.size(2, 2, hard)
    assert sizer.stays_plain(2)
    assert sizer.size(2, 2, usual_rows).nodes == 0
    sizer.choose_anew()
    assert not sizer.stays_plain(2)
    assert sizer.size(2, 2, usual_rows).nodes > 0


def test_text_that_the_head_must_read_first_counts() -> None:
    """A tree that repays itself does not repay reading a long prompt for a short answer."""

    def nodes(unread: int, left: int) -> int:
        sizer = make(token=0.1, level=0.1)
        sizer.cost.reading = Curve([(0, 0.0), (1000, 100.0)])
        sizer.ranks.values = [0.5, 0.3] + [0.0] * 14
        return sizer.size(1, 1, [usual(1)[0]._replace(ahead=lambda: Ahead(unread, left))]).nodes

    assert nodes(0, 200) > 0
    assert nodes(50, 200) > 0
    assert nodes(1000, 200) == 0
    assert nodes(50, 8) == 0


def test_values_measured_before_are_the_prior() -> None:
    sizer = TreeSizer(make(0.1, 0.1).cost, SHAPE, 0, [0.1, 0.05])
    assert sizer.ranks.values[:2] == [0.1, 0.05]
    # None behind it is worth more.
    assert max(sizer.ranks.values[2:]) <= 0.05
    assert sizer.size(1, 1, usual(1)).nodes == 0
    assert TreeSizer(make(0.1, 0.1).cost, SHAPE, 0, [0.9] * 40).size(1, 1, usual(1)).nodes > 0


def test_rows_whose_trees_fare_well_draft_and_the_others_do_not() -> None:
    sizer = make(token=0.1, level=0.1)
    sizer.ranks.values = [0.5, 0.3] + [0.05] * 14
    good, bad = AcceptanceHistory(1.6, 1.0), AcceptanceHistory(0.1, 1.0)
    size = sizer.size(4, 4, [row(bad), row(good), row(bad), row(bad)])
    assert size.nodes > 0
    assert (size.trees, size.least_ratio) == (1, good.ratio)
    assert sizer.size(4, 4, [row(good) for _ in range(4)])[1:] == (4, 0.0, 0.0, 0)


@given(
    st.floats(0.0001, 0.5),
    st.floats(0.0001, 0.5),
    st.lists(st.floats(0.0, 2.0), min_size=1, max_size=9),
    st.lists(st.floats(0, SUREST), min_size=16, max_size=16),
)
def test_a_choice_of_rows_brings_as_much_as_all_of_them(
    token: float, level: float, ratios: list[float], values: list[float]
) -> None:
    sizer, sampled = make(token, level), len(ratios)
    sizer.ranks.values = sorted(values, reverse=True)

    def rate(own: list[float], nodes: int) -> float:
        mean = sum(own) / len(own)
        tokens = sampled + len(own) * sum(min(mean * value, SUREST) for value in sizer.ranks.values[:nodes])
        return tokens / sizer.cost.step(sampled, sampled + len(own) * nodes, len(own), min(nodes, SHAPE.depth))

    size = sizer.size(sampled, sampled, [row(AcceptanceHistory(ratio, 1.0)) for ratio in ratios])
    every = max(rate(ratios, nodes) for nodes in (1, 2, 3, 4, 6, 8, 12, 16))
    if size.nodes:
        chosen = sorted(ratios, reverse=True)[: size.trees]
        assert min(chosen) >= size.least_ratio
        assert rate(chosen, size.nodes) >= every * (1 - 1e-9)
    else:
        assert every <= rate(ratios, 0) * MARGIN * (1 + 1e-9)


def test_a_change_of_kind_is_not_taken_lightly() -> None:
    """If both kinds are as fast, except for noise of 2 %, no trees begin; once they have begun, they must pay."""
    worth, chance = make(token=0.01, level=0.02, shape=DraftShape(1, 1, 1)), random.Random(4)
    cost = worth.cost.step(1, 2, 1, 1) / worth.cost.step(1, 1, 0, 0)

    def kinds(gains: list[float]) -> set[bool]:
        found = set()
        for gain in gains:
            worth.ranks.values = [gain * cost - 1]
            worth.size(1, 1, usual(1, 1, 1))
            # Apart from trials.
            assert worth.outlook is not None
            found.add(worth.outlook.pays)
        return found

    noise = [chance.uniform(0.98, 1.02) for _ in range(100)]
    assert kinds(noise) == {False}
    kinds([1.2] * 8)
    assert kinds([1.01] * 8) == {True}
    kinds([0.98] * 8)
    assert kinds(noise) == {False}


def test_a_request_whose_trees_fare_better_gets_trees() -> None:
    """And one whose trees fare worse gets none, at the same load."""
    worth = make(token=0.1, level=0.1)
    worth.ranks.values = [0.2, 0.1] + [0.0] * 14
    assert worth.size(1, 1, [row(AcceptanceHistory(4.0, 1.0))]).nodes > 0
    assert worth.size(1, 1, [row(AcceptanceHistory(0.2, 1.0))]).nodes == 0
    assert worth.size(1, 1, [row(AcceptanceHistory(4.0, 1.0))]).nodes > 0


@given(
    st.floats(0.0001, 0.5),
    st.floats(0.0001, 0.5),
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_rows_count_with_the_nodes_that_they_may_have(
    token: float, level: float, bounds: list[tuple[int, int]], others: int
) -> None:
    """Against the prediction written out row by row; rows that cannot draft add a token each."""
    sizer, sampled = make(token, level), len(bounds) + others

    def rate(size: int) -> float:
        own = [min(size, nodes) for nodes, _ in bounds]
        levels = min(size, max(depth for _, depth in bounds))
        trees = len(bounds) if size else 0
        tokens = sampled + sum(min(value, SUREST) for nodes in own for value in sizer.ranks.values[:nodes])
        return tokens / sizer.cost.step(sampled, sampled + sum(own), trees, levels)

    chosen = sizer.size(sampled, sampled, [each for own in bounds for each in usual(1, *own)])
    best = max((1, 2, 3, 4, 6, 8, 12, 16), key=rate)
    assert chosen.trees in (0, len(bounds))
    assert chosen.nodes <= max(nodes for nodes, _ in bounds)
    if chosen.nodes:
        assert rate(chosen.nodes) >= max(rate(best), rate(0) * MARGIN) * (1 - 1e-9)
    else:
        assert rate(best) <= rate(0) * MARGIN * (1 + 1e-9)


def test_a_change_of_bounds_is_seen_at_once() -> None:
    sizer = make(token=0.0001, level=0.0001)
    assert sizer.size(2, 2, usual(2)) == TreeSize(16, 2)
    assert sizer.size(2, 2, usual(2, nodes=5)) == TreeSize(5, 2)
    assert sizer.size(2, 2, usual(1) + usual(1, nodes=5)) == TreeSize(16, 2)


def chained(values: list[float], nodes: int = SHAPE.nodes) -> DraftableRow:
    return usual(1, nodes)[0]._replace(chains=values, share=1 - values[0])


@given(st.floats(0.001, 0.5), st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=8), min_size=1, max_size=4))
@example(0.25, [[1.0, 1.0, 1.0, 1.0, 1.0, 0.25]])
def test_no_other_number_of_chain_nodes_brings_more(token: float, values: list[list[float]]) -> None:
    sizer, rows = make(token, 0.1), [chained(sorted(own, reverse=True), nodes=0) for own in values]
    size = sizer.size(len(rows), len(rows), rows)
    assert size.nodes == size.trees == 0
    pool = sorted((value for own in values for value in own), reverse=True)

    def rate(count: int) -> float:
        tokens = len(rows) + sum(pool[:count])
        return tokens / sizer.cost.step(len(rows), len(rows) + count, 0, 0)

    kept = sum(value >= size.least_value for value in pool)
    # Numbers in steps of a tenth are looked at.
    assert rate(kept) >= 0.95 * max(map(rate, range(len(pool) + 1)))


def test_a_good_chain_has_nodes_where_the_model_does_not_pay_and_then_nothing_is_drafted() -> None:
    sizer = make(token=0.01, level=3.0)
    size = sizer.size(2, 2, [chained([0.9, 0.8, 0.7]), *usual(1)])
    assert size.nodes == 0
    assert size.least_value <= 0.7


def test_the_model_drafts_less_where_a_chain_is_nearly_certain() -> None:
    sizer = make(token=0.05, level=0.01)
    nodes = sizer.size(1, 1, usual(1)).nodes
    assert nodes >= 4
    assert sizer.ranks.num_drafted(1.0, nodes) == nodes
    assert sizer.ranks.num_drafted(0.02, nodes) == 0
    assert 0 < sizer.ranks.num_drafted(0.8, nodes) < nodes
    # Where its first node is worth less than a place in the pass, it is not asked at all.
    for _ in range(3):
        assert make(token=0.05, level=0.3).size(1, 1, [chained([0.98, 0.96, 0.94])]).nodes == 0
