"""Measuring ends, whatever the clock does."""

from types import SimpleNamespace

import pytest

from specdec.execution import cost_measurement


@pytest.mark.parametrize("tick", [0.0, 1e-9, 1.0])
def test_a_measurement_ends_on_any_clock(monkeypatch: pytest.MonkeyPatch, tick: float) -> None:
    """A clock that stands still, that hardly moves, or that jumps at each question."""
    now, worked = [0.0], list[int]()

    def clock() -> float:
        now[0] += tick
        return now[0]

    monkeypatch.setattr(cost_measurement, "time", SimpleNamespace(perf_counter=clock))
    curve = cost_measurement._curve(worked.append, [1, 4])
    assert curve.xs == ([1.0, 4.0] if tick < 1 else [1.0])
    assert curve.ys == pytest.approx([tick] * len(curve.xs))
    assert len(worked) <= 2 * (1 + cost_measurement.MOST_ROUNDS * cost_measurement.IN_A_ROW)
