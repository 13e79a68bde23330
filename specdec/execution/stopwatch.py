"""Seconds of a step's parts where they run, without waiting for it."""

import time

import torch

Mark = float | torch.cuda.Event


class Stopwatch:
    """Marks moments. A GPU runs behind the host, so there they are marked among its work.

    Attributes:
        runs_behind: whether what was asked of the device may still be under way when a call is back.
    """

    def __init__(self, device: torch.device) -> None:
        self.runs_behind = device.type == "cuda"

    def mark(self) -> Mark:
        """The moment when all that was asked of the device before is done."""
        if not self.runs_behind:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @staticmethod
    def seconds(start: Mark, end: Mark) -> float:
        """Between two moments, which must have passed."""
        if isinstance(start, float):
            assert isinstance(end, float)
            return end - start
        assert not isinstance(end, float)
        return float(start.elapsed_time(end)) / 1e3
