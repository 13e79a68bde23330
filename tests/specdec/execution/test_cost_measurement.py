"""Measuring ends, whatever the clock does."""

from types import SimpleNamespace

import pytest

from specdec.execution import cost_measurement
from specdec.parallel.ranks import Ranks


@pytest.mark.parametrize("tick", [0.0, 1e-9, 1.0])
def test_a_measurement_ends_on_any_clock(monkeypatch: pytest.MonkeyPatch, tick: float) -> None:
    """A clock that stands still, that hardly moves, or that jumps at each question."""
    now, worked = [0.0], list[int]()

    def clock() -> float:
        now[0] += tick
        return now[0]

    monkeypatch.setattr(cost_measurement, "time", SimpleNamespace(perf_counter=clock))
    curve = cost_measurement._curve(Ranks(), worked.append, [1, 4])
    assert curve.xs == [1.0, 4.0]
    assert curve.ys == pytest.approx([tick] * 2)
    assert len(worked) <= 2 * (1 + cost_measurement.MOST_ROUNDS * cost_measurement.IN_A_ROW)


@pytest.mark.parametrize(("warm_up", "times"), [(0.0, 1), (0.2, 1), (0.3, 3)])
def test_long_parts_are_measured_once_unless_the_first_time_was_longer(
    monkeypatch: pytest.MonkeyPatch, warm_up: float, times: int
) -> None:
    now, worked = [0.0], list[int]()

    def work(size: int) -> None:
        now[0] += 0.002 * size * (1 + warm_up * (size == 100 and size not in worked))
        worked.append(size)

    monkeypatch.setattr(cost_measurement, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(cost_measurement, "ROUNDS", 2)
    monkeypatch.setattr(cost_measurement, "IN_A_ROW", 3)
    curve = cost_measurement._curve(Ranks(), work, [1, 4, 100])
    assert curve.ys == pytest.approx([0.002, 0.008, 0.2 if times > 1 else 0.2 * (1 + warm_up)])
    assert [worked.count(size) for size in (1, 4, 100)] == [7, 7, times]


@pytest.mark.parametrize("delay", [0.1, 0.6])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_one_disturbance_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, number: int, delay: float) -> None:
    """Whichever pass it hits, also where it takes longer than parts that end a curve."""
    now, worked = [0.0], list[int]()

    def work(size: int) -> None:
        worked.append(size)
        now[0] += 0.002 * size + delay * (len(worked) == number)

    monkeypatch.setattr(cost_measurement, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(cost_measurement, "ROUNDS", 2)
    curve = cost_measurement._curve(Ranks(), work, [1, 4, 8])
    assert curve.xs == [1, 4, 8]
    assert curve.ys == pytest.approx([0.002, 0.008, 0.016])


@pytest.mark.parametrize(("seconds", "xs"), [(0.6, [1, 2]), (0.2, [1, 2, 4])])
def test_further_tokens_of_a_slow_model_have_a_cost(
    monkeypatch: pytest.MonkeyPatch, seconds: float, xs: list[int]
) -> None:
    """Its curve ends with the first size above half a second, but has two sizes."""
    now = [0.0]

    def work(size: int) -> None:
        now[0] += seconds * size

    monkeypatch.setattr(cost_measurement, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    curve = cost_measurement._curve(Ranks(), work, [1, 2, 4, 8])
    assert curve.xs == xs
    assert curve.inverse(8 * seconds) == pytest.approx(8)
