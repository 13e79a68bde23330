"""Work beside a step: timing it, learning from it, and host work while the device is busy."""

import math
import time
from collections.abc import Sequence

import torch

from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.execution.device_clock import Mark, seconds_between
from specdec.scheduling.rank_values import TreeOutcome
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.step_cost import MeasuredStep, is_passed_over
from specdec.scheduling.step_plan import PlannedRow, RowResult, prompt_tokens

# Limit of the seconds between two steps that count; the caller may do other things than steps.
MOST_BETWEEN = 0.001


class StepObserver:
    """Measures the engine's steps and corrects the scheduler's predictions by them.

    Measurements of a step are recorded during the next one, while the device is busy. A step is not measured if the
    host did not wait for the device at its end. Neither is the next one, which waits for both.

    Attributes:
        measured: seconds of the pass and of drafting of the last step, where it was measured and nothing has been
            recorded of it yet. Ranks record those of the first one.
    """

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        self.scheduler = scheduler
        self._is_async = device.type == "cuda"
        self._is_unfinished = False
        self._plain_run = 0
        # The last step that is measured, until its measurements are recorded.
        self._step: tuple[Sequence[PlannedRow], Sequence[DraftRow], Sequence[RowResult]] | None = None
        self._start, self._end = 0.0, math.inf
        self.measured: tuple[float, float] | None = None

    def begin(self) -> None:
        """Start the clock of a step, at the end of the last one where that left requests running.

        What lies between two steps, such as planning, is a part of each: beside a small model, a large one.
        """
        now = time.perf_counter()
        self._start = min(now, max(self._end, now - MOST_BETWEEN))

    @property
    def seconds(self) -> float:
        """Seconds since the step's begin."""
        return time.perf_counter() - self._start

    def use_wait(self, measured: tuple[float, float] | None) -> None:
        """Do host work while the device is busy: record the previous step, detokenize, hash waiting prompts.

        Args:
            measured: what the first rank has measured of the previous step.
        """
        if measured is not None:
            assert self._step is not None, "ranks measure the same steps"
            self._learn(*self._step, *measured)
        self._step = self.measured = None
        self.scheduler.look_ahead()
        for request in self.scheduler.running:
            request.detokenizer.settle()

    def end(
        self,
        rows: Sequence[PlannedRow],
        draft_rows: Sequence[DraftRow],
        results: Sequence[RowResult],
        drafting: Sequence[tuple[Mark, Mark]],
    ) -> None:
        """Stop the clock of a step, and keep its measurements until the next one.

        Args:
            drafting: when the drafter's parts of the step began and ended.
        """
        was_unfinished = self._is_unfinished
        # Only sampling makes the host wait.
        self._is_unfinished = self._is_async and not any(row.sampled or row.choices is not None for row in rows)
        is_plain = not any(
            row.num_known > 1 or row.num_nodes or row.num_chained or row.choices is not None for row in rows
        )
        self._plain_run = self._plain_run + 1 if is_plain else 0
        if self.scheduler.step_cost is not None and not (
            was_unfinished or self._is_unfinished or is_passed_over(self._plain_run)
        ):
            seconds, draft_seconds = self.seconds, sum(seconds_between(*part) for part in drafting)
            self._step = rows, draft_rows, results
            self.measured = seconds - draft_seconds, draft_seconds
        self._end = time.perf_counter() if self.scheduler.running else math.inf

    def _learn(
        self,
        rows: Sequence[PlannedRow],
        draft_rows: Sequence[DraftRow],
        results: Sequence[RowResult],
        seconds: float,
        draft_seconds: float,
    ) -> None:
        drafted, prompts = [row for row in draft_rows if row.num_nodes], prompt_tokens(rows)
        decoded = [result.num_nodes for result, count in zip(results, prompts, strict=True) if not count]
        self.scheduler.learn(
            MeasuredStep(
                rows=len(decoded),
                tokens=len(decoded) + sum(decoded),
                prompts=sum(prompts),
                seconds=seconds,
                trees=len(drafted),
                levels=max((row.max_depth for row in drafted), default=0),
                read=sum(max(0, row.draft_prefill_end - row.num_draft_cached) for row in draft_rows),
                draft_seconds=draft_seconds,
            ),
            [
                TreeOutcome(
                    row.num_nodes, size, [rank for rank in result.ranks if rank < size], row.request.acceptance_history
                )
                for row, result in zip(rows, results, strict=True)
                if (size := result.num_nodes - result.num_chained)
            ],
        )
