"""Timers of single calls, on a GPU and on a CPU."""

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from specdec.execution.cuda_graphs import CudaGraphs

WARM_UP = 3
# Several times the second-level cache of any GPU.
FLUSHED_BYTES = 2**28

Run = Callable[[], Any]


class Clock(Protocol):
    def prepare(self, run: Run, captured: bool) -> Run:
        """Warm a call up and return what to time: the call, or its captured graph."""

    def median_us(self, run: Run, iterations: int) -> float:
        """Return the median microseconds of a call. Where the clock can, inputs are flushed from caches before each."""


class CudaClock:
    """Events around each call, behind a read of more memory than the second-level cache holds.

    A read, as what is written would still have to be written back while the call runs. It also keeps the device busy
    until the host has queued the call, so that a captured call's time is the device's alone; of one that is not,
    waiting for the host belongs to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._graphs = CudaGraphs(device)
        self._flushed = torch.ones(FLUSHED_BYTES // 4, device=device)

    def prepare(self, run: Run, captured: bool) -> Run:
        if captured:
            return self._graphs.capture(run)
        for _ in range(WARM_UP):
            run()
        return run

    def median_us(self, run: Run, iterations: int) -> float:
        events = [(_event(), _event()) for _ in range(iterations)]
        for start, end in events:
            self._flushed.sum()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return 1e3 * float(statistics.median(start.elapsed_time(end) for start, end in events))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class HostClock:
    """The host's own clock, and caches as they are: shows that a benchmark runs, not how fast a kernel is."""

    def prepare(self, run: Run, captured: bool) -> Run:  # noqa: ARG002
        return run

    def median_us(self, run: Run, iterations: int) -> float:
        times = []
        for _ in range(iterations):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
