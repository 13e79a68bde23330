"""The comparison of `specdec generate --compare`, and the reason for plain steps in its last line."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.cli import timed_batch
from specdec.cli.render import summary
from specdec.cli.timed_batch import TimedAnswer, TimedBatch, measure_in_turns
from specdec.core.engine_stats import DraftOutlook
from specdec.core.outputs import CompletionOutput, SpeculationStats, Step
from specdec.text.segment import Segment

DRAFTED: Any = "with drafts"
PLAIN: Any = "without"


def batch(seconds: float, interrupted: bool = False) -> TimedBatch:
    return TimedBatch([TimedAnswer(CompletionOutput(0, "a", [5], [False], "stop"))], seconds, interrupted)


class Machine:
    """A machine whose runs take the times of two lists."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafted: Sequence[float], plain: Sequence[float]) -> None:
        self._times = {DRAFTED: iter(drafted), PLAIN: iter(plain)}
        self._clock, self.order = 0.0, list[str]()
        monkeypatch.setattr(timed_batch, "run_batch", self._run)
        monkeypatch.setattr(timed_batch, "time", SimpleNamespace(perf_counter=lambda: self._clock))

    def _run(self, llm: Any, *_: object) -> TimedBatch:
        self.order.append(llm)
        seconds = next(self._times[llm], None)
        self._clock += seconds or 0.0
        return batch(seconds or 0.0, interrupted=seconds is None)


def test_rounds_are_interleaved_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of each is no measurement, and a slow moment changes nothing."""
    machine = Machine(monkeypatch, [0.5, 0.4, 4.0, 0.4, 0.5], [4.0, 1.0, 1.1, 4.0, 1.0, 0.9])
    first = batch(3.0)
    first.answers[0].segments = [Segment("shown", True)]
    drafted, plain = measure_in_turns([DRAFTED, PLAIN], [[3]], [], first)
    assert (drafted.seconds, plain.seconds) == (0.5, 1.0)
    assert machine.order[0] == PLAIN
    assert machine.order[1:] == [DRAFTED, PLAIN, PLAIN, DRAFTED, DRAFTED, PLAIN, PLAIN, DRAFTED, DRAFTED, PLAIN]
    assert drafted.answers[0].segments == [Segment("shown", True)]


def test_short_runs_are_repeated_until_they_have_taken_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [0.1] * 100, [0.3] * 100)
    measure_in_turns([DRAFTED, PLAIN], [[3]], [], batch(1.0))
    assert machine.order.count(DRAFTED) == 11  # 4 seconds in rounds of 0.4


def test_long_runs_count_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [], [25.0])
    drafted, plain = measure_in_turns([DRAFTED, PLAIN], [[3]], [], batch(20.0))
    assert (drafted.seconds, plain.seconds, machine.order) == (20.0, 25.0, [PLAIN])


@pytest.mark.parametrize(("drafted", "plain"), [([], []), ([], [1.0]), ([1.0, 1.0], [1.0, 1.0])])
def test_an_interrupt_ends_the_comparison(
    monkeypatch: pytest.MonkeyPatch, drafted: list[float], plain: list[float]
) -> None:
    Machine(monkeypatch, drafted, plain)
    found = measure_in_turns([DRAFTED, PLAIN], [[3]], [], batch(2.0))
    assert [one.interrupted for one in found] == [False, True]
    assert found[0].seconds == 2.0


def answered(trees: int, outlook: DraftOutlook | None) -> TimedBatch:
    """An answer of ten tokens in six steps, some of them with trees."""
    steps = [Step(8, 1)] * trees
    stats = SpeculationStats(6, 9, [3])
    return TimedBatch(
        [TimedAnswer(CompletionOutput(0, "", [5] * 10, [], "stop", stats=stats, steps=steps))], 2.0, outlook=outlook
    )


def test_the_last_line_says_why_drafts_are_off() -> None:
    figures = "tau 1.50: 9 tokens in 6 steps, 3 of them drafted, and 1 from the prompt pass"
    line = f"10 tokens, 5.0 tok/s; {figures}"
    why = "; drafts did not pay at the end: a cycle costs 2.6 plain steps, tau is 1.9"
    off, on = DraftOutlook(False, 2.61, 1.94), DraftOutlook(True, 1.2, 2.9)
    assert summary(answered(3, off)) == line + why
    assert summary(answered(6, off)) == line
    assert summary(answered(3, on)) == line
    assert summary(answered(3, None)) == line
    assert summary(answered(3, DraftOutlook(False, 1.02, 1.01))) == line
