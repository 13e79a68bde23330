"""Curves through measured points, and costs that are corrected as an engine runs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.curve import Curve
from specdec.prefill_limit import LEAST, PrefillLimit
from specdec.step_cost import StepCost

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


def test_costs_of_a_step() -> None:
    cost = make(first_level=Curve([(1, 0.1)]), all_levels=Curve([(1, 0.7)]))
    assert cost.step(1, 1, 0, 0) == 1.0
    cost.deeper.value = 1.0
    assert cost.step(11, 51, 0, 0) == 2.5
    assert cost.step(1, 1, 1, 1) == pytest.approx(1.1)
    assert cost.step(1, 1, 1, 4) == pytest.approx(1.7)


def test_what_a_machine_really_takes_is_learnt() -> None:
    """Each part is off by a factor of its own; all are found, through noise and accidents."""
    chance = random.Random(0)
    cost = make(first_level=Curve([(1, 0.1), (9, 0.3)]), all_levels=Curve([(1, 0.7), (9, 1.5)]))
    true = make(first_level=cost.first_level, all_levels=cost.all_levels)
    true.plain.value, true.checking.value, true.first.value, true.deeper.value = 1.7, 2.1, 0.6, 0.4
    true.prefill.value = 3.0

    def noise() -> float:
        return chance.uniform(0.9, 1.1) * (10 if chance.random() < 0.02 else 1)

    for step in range(2000):
        rows, trees = chance.randint(1, 9), 0 if step % 3 else chance.randint(1, 9)
        levels = chance.choice([1, 4]) if trees else 0
        tokens, prompts = rows + trees * 5, 0 if step % 7 else 40
        draft = true.draft(trees, levels)
        seconds = true.step(rows, tokens, trees, levels) - draft
        seconds += true.prefill.value * (true.passes(tokens + prompts) - true.passes(tokens))
        cost.correct(rows, tokens, prompts, seconds * noise(), trees, levels, trees, draft * noise())
    # Over 30 seeds the first three are off by 0.07 at most, deeper by 0.1, prefill, the median of three, by 0.35.
    for name, most in (("plain", 0.08), ("checking", 0.08), ("first", 0.08), ("deeper", 0.12), ("prefill", 0.4)):
        assert getattr(cost, name).value == pytest.approx(getattr(true, name).value, rel=most), name


def test_reading_is_not_taken_for_drafting() -> None:
    cost = make(first_level=Curve([(1, 0.1)]), all_levels=Curve([(1, 0.7)]), reading=Curve([(1, 0.0), (101, 5.0)]))
    for _ in range(50):
        cost.correct(1, 6, 0, 1.05, 1, 1, 101, 5.1)
    assert cost.first.value == pytest.approx(1.0)


def test_one_accident_changes_little() -> None:
    cost = make()
    for _ in range(20):
        cost.correct(1, 1, 0, 1.0, 0, 0, 0, 0.0)
    cost.correct(1, 1, 0, 100.0, 0, 0, 0, 0.0)
    assert cost.plain.value == 1.0


def test_a_part_that_seems_to_take_no_time_is_not_free() -> None:
    """A step with a prompt that took no longer than one without."""
    cost = make()
    for _ in range(9):
        cost.correct(1, 1, 50, 0.5, 0, 0, 0, 0.0)
        cost.correct(1, 1, 0, 0.0, 1, 1, 0, 0.0)
    assert cost.prefill.value > 0
    assert 0 < PrefillLimit(cost, 2.0).tokens(1, 8, 0, 0, 0) < 10**9
    assert cost.step(1, 1, 0, 0) > 0


def test_prompts_get_what_the_stretch_allows() -> None:
    cost = StepCost(Curve([(1, 1.0), (101, 2.0)]))
    # A step of 11 rows takes 1.1; twice that is the pass over 121 tokens.
    assert PrefillLimit(cost, 2.0).tokens(1, 11, 0, 0, 0) == pytest.approx(110, abs=1)
    assert PrefillLimit(cost, 1.001).tokens(1, 11, 0, 0, 0) == LEAST
    assert PrefillLimit(cost, 2.0).tokens(3, 11, 0, 0, 0) == pytest.approx(330, abs=1)
    cost.prefill.value = 2.0
    assert PrefillLimit(cost, 2.0).tokens(1, 11, 0, 0, 0) == pytest.approx(55, abs=1)


def test_prompts_are_not_limited_where_nobody_waits_or_nothing_is_asked() -> None:
    cost = StepCost(Curve([(1, 1.0), (101, 2.0)]))
    assert PrefillLimit(cost, 2.0).tokens(1, 0, 0, 0, 0) > 10**9
    assert PrefillLimit(cost, 0.0).tokens(1, 8, 0, 0, 0) > 10**9
    # Bound by memory: more tokens cost nothing.
    assert PrefillLimit(StepCost(Curve([(1, 1.0), (256, 1.0)])), 2.0).tokens(1, 8, 0, 0, 0) > 10**9
