"""Curves through measured points, and costs that are corrected as an engine runs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.scheduling.step_cost import (
    LEAST_PROMPT_TOKENS,
    MEASURED_EVERY,
    WARM_SECONDS,
    Curve,
    MeasuredStep,
    Ratio,
    StepCost,
)

points = st.lists(
    st.tuples(st.integers(1, 1000), st.floats(0.001, 1.0)), min_size=1, max_size=6, unique_by=lambda p: p[0]
).map(sorted)


@given(points, st.floats(0, 2000), st.floats(0, 2000))
def test_a_curve_never_falls(given_points: list[tuple[int, float]], a: float, b: float) -> None:
    curve = Curve(given_points)
    low, high = sorted((a, b))
    assert 0 <= curve(low) <= curve(high) + 1e-12
    assert curve(given_points[0][0]) == pytest.approx(given_points[0][1])


@given(points, st.floats(0.0, 2.0))
def test_the_inverse_of_a_curve(given_points: list[tuple[int, float]], y: float) -> None:
    curve = Curve(given_points)
    x = curve.inverse(y)
    if x == float("inf"):
        assert curve(1e9) <= y + 1e-9
    elif x > 0:
        assert curve(x) == pytest.approx(max(y, curve.ys[0] if x == curve.xs[0] else y), abs=1e-6)


def test_a_curve_passes_between_and_beyond_its_points() -> None:
    curve = Curve([(1, 2.0), (3, 4.0), (5, 3.0)])
    assert [curve(x) for x in (1, 2, 3, 4, 9)] == [2.0, 3.0, 4.0, 4.0, 4.0]
    assert curve.inverse(3.0) == 2.0
    assert Curve([(1, 1.0), (2, 3.0)])(4) == 7.0
    assert Curve([(1, 1.0), (2, 3.0)]).inverse(7.0) == 4.0


@pytest.mark.parametrize("wrong", [[], [(1, 1.0), (1, 2.0)], [(2, 1.0), (1, 2.0)]])
def test_a_curve_needs_ascending_points(wrong: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Curve(wrong)


def make(**fields: Curve) -> StepCost:
    return StepCost(Curve([(1, 1.0), (101, 2.0)]), Curve([(1, 0.0), (11, 1.0)]), depth=4, **fields)


def test_a_step_without_drafts_beside_prompts() -> None:
    cost = StepCost(Curve([(1, 1.0), (101, 2.0)]), Curve([(1, 0.0), (11, 1.0)]))
    assert cost.without_drafts(6, 0) == pytest.approx(cost.step(6, 6, 0, 0)) == pytest.approx(1.05 + 0.5)
    # 50 tokens of prompts make the pass longer, as much as was measured.
    cost.prefill.value = 0.5
    assert cost.without_drafts(6, 50) == pytest.approx(1.55 + 0.5 * 0.5)
    assert cost.without_drafts(0, 51) == pytest.approx(0.5 * 1.5)


def test_costs_of_a_step() -> None:
    cost = make(first_level=Curve([(1, 0.1)]), all_levels=Curve([(1, 0.7)]))
    assert cost.step(1, 1, 0, 0) == 1.0
    cost.deeper[4].value = 1.0
    assert cost.step(11, 51, 0, 0) == 2.5
    assert cost.step(1, 1, 1, 1) == pytest.approx(1.1)
    assert cost.step(1, 1, 1, 4) == pytest.approx(1.7)


def test_true_costs_of_a_machine_are_learnt() -> None:
    """Each part is off by a factor of its own; all are found, through noise and accidents."""
    chance = random.Random(0)
    cost = make(first_level=Curve([(1, 0.1), (9, 0.3)]), all_levels=Curve([(1, 0.7), (9, 1.5)]))
    true = make(first_level=cost.first_level, all_levels=cost.all_levels)
    parts = [("plain", 1.7, 0.08), ("checking", 2.1, 0.08), ("first", 0.6, 0.08), ("prefill", 3.0, 0.5)]
    for name, factor, _ in parts[:2]:
        for rows in range(1, 10):
            for clock in range(9):
                getattr(true, name).correct(rows, factor, 1.0, float(clock))
    true.first.value, true.deeper[4].value, true.prefill.value = 0.6, 0.4, 3.0

    def noise() -> float:
        return chance.uniform(0.9, 1.1) * (10 if chance.random() < 0.02 else 1)

    for step in range(2000):
        rows, trees = chance.randint(1, 9), 0 if step % 24 < 16 else chance.randint(1, 9)
        levels = chance.choice([1, 4]) if trees else 0
        tokens, prompts = rows + trees * 5, 0 if step % 7 else 40
        draft = true.draft(trees, levels)
        seconds = true.step(rows, tokens, trees, levels) - draft
        seconds += true.prefill.value * (true.passes(tokens + prompts) - true.passes(tokens))
        cost.correct(MeasuredStep(rows, tokens, prompts, seconds * noise(), trees, levels, trees, draft * noise()))
    for name, factor, most in parts:
        part = getattr(cost, name)
        found = [part.value] if isinstance(part, Ratio) else [part.at(rows) for rows in range(1, 10)]
        assert found == pytest.approx([factor] * len(found), rel=most), name
    assert cost.deeper[4].value == pytest.approx(0.4, rel=0.3)


def test_each_number_of_rows_has_a_correction_of_its_own() -> None:
    """A batch's steps say little of a single row's."""
    cost = make()
    for _ in range(20):
        cost.correct(MeasuredStep(8, 8, 0, 3 * cost.passes(8) + 3 * cost.rows(8), 0, 0, 0, 0.0))
    assert cost.plain.at(8) == pytest.approx(3.0)
    # As long as nothing else is known.
    assert cost.plain.at(1) == pytest.approx(3.0)
    for _ in range(20):
        cost.correct(MeasuredStep(1, 1, 0, cost.passes(1), 0, 0, 0, 0.0))
    assert (cost.plain.at(1), cost.plain.at(8)) == pytest.approx((1.0, 3.0))


def test_a_number_of_rows_that_was_seldom_measured_leans_on_the_nearest() -> None:
    """Under load seven rows mostly run beside a prompt: a disturbed step of theirs would count for long."""
    cost = make()

    def measure(rows: int, nodes: int, factor: float, times: int) -> None:
        for _ in range(times):
            tokens = rows * (1 + nodes)
            own = cost.passes(tokens) + cost.rows(rows)
            cost.correct(MeasuredStep(rows, tokens, 0, factor * own, 0, 0, 0, 0.0))

    measure(8, 0, 1.3, 9)
    measure(8, 1, 1.3, 9)
    assert (cost.plain.at(7), cost.checking.at(7)) == pytest.approx((1.3, 1.3))
    # The first step of a size does not count, so this is one measurement.
    measure(7, 1, 2.0, 2)
    assert (cost.plain.at(7), cost.checking.at(7)) == pytest.approx((1.3, 1.3))
    # What three of them say is its own.
    measure(7, 1, 2.0, 2)
    assert cost.checking.at(7) == pytest.approx(2.0)
    assert (cost.plain.at(8), cost.checking.at(8)) == pytest.approx((1.3, 1.3))


def test_numbers_of_rows_that_nobody_measured_are_no_neighbours() -> None:
    """A ratio that merely followed that of the other kind of step is not preferred to a measured one."""
    cost = make()
    # Of two rows only steps with trees are measured, which their plain ones follow.
    for _ in range(3):
        cost.correct(MeasuredStep(2, 8, 0, cost.passes(8) + cost.rows(2), 0, 0, 0, 0.0))
    for _ in range(9):
        cost.correct(MeasuredStep(8, 8, 0, 1.5 * (cost.passes(8) + cost.rows(8)), 0, 0, 0, 0.0))
    assert cost.plain.at(7) == pytest.approx(1.5)


def test_steps_with_trees_are_taken_to_last_as_much_longer_as_plain_ones_until_they_are_measured() -> None:
    """Contexts grow, and other programs run. Measured costs of an empty machine would make trees look cheap."""
    cost = make()
    for _ in range(9):
        cost.correct(MeasuredStep(8, 8, 0, 3 * cost.passes(8) + 3 * cost.rows(8), 0, 0, 0, 0.0))
    assert cost.checking.at(8) == pytest.approx(3.0)
    for _ in range(9):
        cost.correct(MeasuredStep(8, 40, 0, 4 * cost.passes(40) + 4 * cost.rows(8), 0, 0, 0, 0.0))
    assert cost.checking.at(8) == pytest.approx(4.0)
    for _ in range(9):
        cost.correct(MeasuredStep(8, 8, 0, 5 * cost.passes(8) + 5 * cost.rows(8), 0, 0, 0, 0.0))
    assert (cost.plain.at(8), cost.checking.at(8)) == pytest.approx((5.0, 4.0))


def test_trees_that_were_not_measured_for_long_follow_plain_steps() -> None:
    """Under load, trees are measured seldom, and contexts grow meanwhile."""
    cost = make()

    def measure(nodes: int, factor: float, steps: int) -> None:
        for _ in range(steps):
            tokens = 8 * (1 + nodes)
            own = cost.passes(tokens) + cost.rows(8)
            cost.correct(MeasuredStep(8, tokens, 0, factor * own, 0, 0, 0, 0.0))

    measure(0, 2.0, 9)
    measure(1, 3.0, 9)
    measure(0, 2.0, 100)
    assert (cost.plain.at(8), cost.checking.at(8)) == pytest.approx((2.0, 3.0))
    measure(0, 4.0, 9)
    assert (cost.plain.at(8), cost.checking.at(8)) == pytest.approx((4.0, 6.0))
    # Plain steps do not follow: they are tried often enough, and how steps with trees differ says nothing of them.
    measure(1, 3.0, 200)
    assert (cost.plain.at(8), cost.checking.at(8)) == pytest.approx((4.0, 3.0))
    # After that long, what a plain step has become is no sign of what happened to trees since.
    measure(0, 5.0, 9)
    assert (cost.plain.at(8), cost.checking.at(8)) == pytest.approx((5.0, 3.0))


@pytest.mark.parametrize("nodes", [0, 2])
def test_what_decoding_rows_take_is_measured_under_a_load_of_prompts(nodes: int) -> None:
    """Their contexts have doubled their cost. Taken for the prompts', that would leave each step the least tokens."""
    cost = StepCost(Curve([(1, 0.01), (101, 0.02), (1001, 0.11)]))
    trees, own = (8, 24) if nodes else (0, 8)
    allowed = []
    for _ in range(300):
        tokens = 0 if cost.is_due(8, own) else cost.prompt_tokens(1.75, 1, 8, nodes, trees, 0)
        allowed.append(tokens)
        more = cost.passes(own + tokens) - cost.passes(own)
        cost.correct(MeasuredStep(8, own, tokens, 2 * cost.passes(own) + more, trees, 0, trees, 0.0))
    expected = cost.passes.inverse(cost.passes(own) + 0.75 * 2 * cost.passes(own)) - own
    assert allowed[-100:-1].count(0) in (1, 2)
    assert all(tokens in (0, pytest.approx(expected, abs=1)) for tokens in allowed[-100:])
    assert cost.prefill.value == pytest.approx(1.0)
    assert (cost.checking if nodes else cost.plain).at(8) == pytest.approx(2.0)


@given(st.lists(st.tuples(st.integers(1, 9), *[st.booleans()] * 3, st.floats(1e-5, 0.1)), min_size=40, max_size=200))
def test_prompts_do_not_wait_long_for_a_measurement(steps: list[tuple[int, bool, bool, bool, float]]) -> None:
    """Steps may have other trees than were planned; plain ones that follow trees closely tell nothing."""
    cost, waited = StepCost(Curve([(1, 0.001), (101, 0.002)])), 0.0
    for rows, plans_trees, has_trees, has_prompts, seconds in steps:
        is_due = cost.is_due(rows, 2 * rows if plans_trees else rows)
        waited = waited + seconds if is_due else 0.0
        assert waited <= WARM_SECONDS + seconds + 0.1
        prompts = 20 if has_prompts and not is_due else 0
        tokens, trees = (2 * rows, rows) if has_trees else (rows, 0)
        cost.correct(MeasuredStep(rows, tokens, prompts, seconds, trees, 1, trees, 0.0))


@pytest.mark.parametrize("rows", [1, 8])
def test_the_first_plain_steps_after_trees_tell_nothing(rows: int) -> None:
    """The weights of a plain step are not in the caches yet, whatever else the step computes."""
    cost = StepCost(Curve([(1, 3e-4), (101, 6e-4)]), first_level=Curve([(1, 1e-4)]), all_levels=Curve([(1, 7e-4)]))
    plain = cost.step(rows, rows, 0, 0)
    for _ in range(60):
        for _ in range(3):
            cost.correct(MeasuredStep(rows, 6 * rows, 0, cost.passes(6 * rows), 1, 1, 1, 1e-4))
        for place in range(1 + int(WARM_SECONDS / (1.5 * plain))):
            cost.correct(MeasuredStep(rows, rows, 3 * (place % 2), 1.5 * plain, 0, 0, 0, 0.0))
        for _ in range(2):
            cost.correct(MeasuredStep(rows, rows, 0, plain, 0, 0, 0, 0.0))
    assert cost.plain.knows(rows)
    assert cost.plain.at(rows) == pytest.approx(1.0)
    # A step of a large model is longer than that.
    large = make()
    for seconds in (1.05, 1.05):
        large.correct(MeasuredStep(rows, 6 * rows, 0, seconds, 1, 1, 1, 0.1))
    for _ in range(2):
        large.correct(MeasuredStep(rows, rows, 0, 2 * (large.passes(rows) + large.rows(rows)), 0, 0, 0, 0.0))
    assert large.plain.knows(rows)


def test_steps_that_were_disturbed_are_passed_over() -> None:
    """Another program takes the processor for a while: most of the last steps took longer, not all of them."""
    cost = make()
    for seconds in (1.0, 1.1, 2.0, 1.1, 3.0, 2.0, 1.1, 1.0, 2.0, 5.0):
        cost.correct(MeasuredStep(1, 6, 0, seconds * cost.passes(6), 1, 1, 1, 0.1))
        assert cost.checking.at(1) <= 1.1
    for _ in range(5):
        cost.correct(MeasuredStep(1, 6, 0, 2 * cost.passes(6), 1, 1, 1, 0.1))
    assert cost.checking.at(1) == pytest.approx(2.0)


def test_drafting_that_mostly_stops_early_is_not_taken_for_drafting_that_always_does() -> None:
    """One in four trees goes to the last level: a median would say that none does."""
    cost = make(first_level=Curve([(1, 0.1)]), all_levels=Curve([(1, 0.7)]))
    for step in range(MEASURED_EVERY * 64):
        cost.correct(MeasuredStep(1, 6, 0, 1.05, 1, 4, 1, 0.7 if step % 4 == 0 else 0.1))
    assert cost.draft(1, 4) == pytest.approx(0.1 + 0.6 / 4, rel=0.1)
    # What shallower trees take is their own.
    for _ in range(MEASURED_EVERY * 64):
        cost.correct(MeasuredStep(1, 3, 0, 1.05, 1, 2, 1, 0.3))
    assert cost.draft(1, 4) == pytest.approx(0.1 + 0.6 / 4, rel=0.1)
    assert cost.draft(1, 2) == pytest.approx(0.3, rel=0.1)


def test_reading_is_not_taken_for_drafting() -> None:
    cost = make(first_level=Curve([(1, 0.1)]), all_levels=Curve([(1, 0.7)]), reading=Curve([(1, 0.0), (101, 5.0)]))
    for _ in range(50):
        cost.correct(MeasuredStep(1, 6, 0, 1.05, 1, 1, 101, 5.1))
    assert cost.first.value == pytest.approx(1.0)


def test_one_accident_changes_little() -> None:
    cost = make()
    for _ in range(20):
        cost.correct(MeasuredStep(1, 1, 0, 1.0, 0, 0, 0, 0.0))
    cost.correct(MeasuredStep(1, 1, 0, 100.0, 0, 0, 0, 0.0))
    assert cost.plain.at(1) == 1.0


def test_a_part_that_seems_to_take_no_time_is_not_free() -> None:
    """A step with a prompt that took no longer than one without."""
    cost = make()
    for _ in range(9):
        cost.correct(MeasuredStep(1, 1, 50, 0.5, 0, 0, 0, 0.0))
        cost.correct(MeasuredStep(1, 1, 0, 0.0, 1, 1, 0, 0.0))
    assert cost.prefill.value > 0
    assert 0 < cost.prompt_tokens(2.0, 1, 8, 0, 0, 0) < 10**9
    assert cost.step(1, 1, 0, 0) > 0


def test_prompts_get_what_the_stretch_allows() -> None:
    cost = StepCost(Curve([(1, 1.0), (101, 2.0)]))
    # A step of 11 rows takes 1.1; twice that is the pass over 121 tokens.
    assert cost.prompt_tokens(2.0, 1, 11, 0, 0, 0) == pytest.approx(110, abs=1)
    assert cost.prompt_tokens(1.001, 1, 11, 0, 0, 0) == LEAST_PROMPT_TOKENS
    assert cost.prompt_tokens(2.0, 3, 11, 0, 0, 0) == pytest.approx(330, abs=1)
    cost.prefill.value = 2.0
    assert cost.prompt_tokens(2.0, 1, 11, 0, 0, 0) == pytest.approx(55, abs=1)


def test_prompts_are_not_limited_where_nobody_waits_or_nothing_is_asked() -> None:
    cost = StepCost(Curve([(1, 1.0), (101, 2.0)]))
    assert cost.prompt_tokens(2.0, 1, 0, 0, 0, 0) > 10**9
    assert cost.prompt_tokens(0.0, 1, 8, 0, 0, 0) > 10**9
    # Bound by memory: more tokens cost nothing.
    assert StepCost(Curve([(1, 1.0), (256, 1.0)])).prompt_tokens(2.0, 1, 8, 0, 0, 0) > 10**9
