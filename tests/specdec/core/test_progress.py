"""The progress bar of a batch."""

import io
import re

import pytest
from rich.console import Console

from specdec.core import progress
from specdec.core.outputs import SpeculationStats


def shown(monkeypatch: pytest.MonkeyPatch, stats: SpeculationStats | None, total: int = 4, tree: str = "") -> str:
    """Return the output to a terminal of a bar with half of its work done."""
    screen = io.StringIO()

    def console(**_: object) -> Console:
        return Console(file=screen, force_terminal=True, width=160, color_system=None)

    monkeypatch.setattr(progress, "Console", console)
    figures = None if stats is None else lambda: stats
    with progress.progress_bar(total, "generating", figures=figures, tree=tree) as advance:
        advance()
        advance()
    return screen.getvalue()


def test_a_batch_shows_its_speed_the_time_left_and_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, SpeculationStats(steps=8, tokens=20))
    assert re.search(r"generating .*2/4 0:00:0\d left [-\d:]+ +[\d.]+ tok/s, tau 2\.50", text)


def test_beside_tau_stands_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, SpeculationStats(steps=8, tokens=20), tree="at most 8 nodes, depth 6")
    assert "tau 2.50 (at most 8 nodes, depth 6)" in text


def test_other_work_has_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, None)
    assert "2/4" in text
    assert "tok/s" not in text


def test_before_the_first_step_there_is_no_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, SpeculationStats())
    assert "tok/s" in text
    assert "tau" not in text


def test_a_single_prompt_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, SpeculationStats(steps=8, tokens=20), total=1) == ""
