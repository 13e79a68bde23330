"""Acceptance histories of requests."""

import pytest

from specdec.core.draftable_row import PRIOR, AcceptanceHistory


def test_a_history_starts_as_the_average_and_forgets() -> None:
    history = AcceptanceHistory()
    assert history.ratio == 1
    # One tree tells little.
    history.learn(0, 1.0)
    assert 0.8 < history.ratio < 1
    for _ in range(8):
        history.learn(0, PRIOR)
    assert history.ratio < 0.2
    for _ in range(300):
        history.learn(3, 2.0)
    assert history.ratio == pytest.approx(1.5, abs=0.01)
