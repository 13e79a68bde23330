"""Time on a device, of which each microsecond is work, a gap between kernels, or a wait for the host."""

import pytest

from benchmarks.gpu.steps import Event, summary


def test_time_is_work_gap_or_wait() -> None:
    """The second kernel overlaps the first; the third comes right after; the fourth begins a step."""
    events = [Event("b", 8, 6), Event("a", 0, 10), Event("a", 16, 4), Event("c", 120, 5)]
    found = summary(events, 2)
    assert (found["busy_ms"], found["small_gaps_ms"], found["idle_ms"]) == (
        pytest.approx(0.0115, abs=1e-3),
        pytest.approx(0.001, abs=1e-3),
        pytest.approx(0.05, abs=1e-3),
    )
    assert found["kernels"] == 2
    assert [(one["name"], one["a_step"], one["us"]) for one in found["by_name"]] == [
        ("a", 1.0, 7.0),
        ("b", 0.5, 3.0),
        ("c", 0.5, 2.5),
    ]


def test_nothing_takes_no_time() -> None:
    assert summary([], 4) == {"busy_ms": 0, "small_gaps_ms": 0, "idle_ms": 0, "kernels": 0, "by_name": []}
