"""Measure where the time of a step goes at the shape of Llama-3.1-8B: kernels by name, and the gaps between them.

A stage of `benchmarks.gpu.day`, short enough to run on two trees in turn. Steps replay CUDA graphs: plain ones, and
those with an EAGLE-3 head and a forced number of accepted drafts. Medians are of steps that nothing watches; kernels
and gaps are those that torch's profiler has seen in a few others, which it makes slower.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.cycle import copy_bandwidth
from benchmarks.gpu.cycle_engines import Engines, step_times
from benchmarks.gpu.cycle_sizes import FULL, TINY
from benchmarks.gpu.stage import Stage

# Drafts that are accepted, None for plain steps; requests at once; steps that are timed and that are profiled.
ACCEPTED, BATCHES, TIMED, PROFILED = (None, 0, 2), (1, 8), 24, 4
# Gaps up to it lie between kernels of a graph; in longer ones the GPU waits for the host.
SMALL_GAP_US = 4.0
# Kernels that are listed, and characters of their names.
MOST_KERNELS, NAME = 40, 90


class Event(NamedTuple):
    """A kernel or copy on the device; times in microseconds."""

    name: str
    start: float
    length: float


def run(stage: Stage) -> None:
    sizes = TINY if stage.rehearse else FULL
    engines = Engines(sizes, stage.device)
    engines.use("eagle3")
    rows: list[dict[str, Any]] = []
    stage.figures |= {"copy_gb_per_s": round(copy_bandwidth(stage.device) / 1e9, 1), "shape": sizes.shape, "rows": rows}
    stage.table = Table("batch", "accepted", "median ms", "busy ms", "small gaps ms", "idle ms", "kernels")
    for batch in sizes.batches if stage.rehearse else BATCHES:
        for accepted in ACCEPTED:
            engine = (engines.plain if accepted is None else engines.eagle)["graphs"]
            engines.forced["graphs"].accepted = accepted or 0
            with engines.decoding(engine, batch):
                times = step_times(engine, 1 if stage.rehearse else TIMED)
                events = [] if stage.rehearse else profiled(engine)
            row = {"batch": batch, "accepted": accepted, "median_ms": round(statistics.median(times) * 1e3, 3)}
            rows.append(row | summary(events, PROFILED))
            stage.show(str({name: value for name, value in rows[-1].items() if name != "by_name"}))
            stage.table.add_row(*(str(value) for name, value in rows[-1].items() if name != "by_name"))


def profiled(engine: Any) -> list[Event]:
    """Return what the device does in some steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    events: Any = found.events()
    own = [event for event in events if event.device_type.name == "CUDA"]
    return [Event(event.name, event.time_range.start, event.time_range.elapsed_us()) for event in own]


def summary(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Return milliseconds of a step in which the device works, goes from kernel to kernel, and waits for the host.

    Args:
        events: of `steps` steps.
    """
    busy = small = idle = 0.0
    end: float | None = None
    counts, times = Counter[str](), defaultdict[str, float](float)
    for name, start, length in sorted(events, key=lambda event: event.start):
        if end is not None:
            gap = max(0.0, start - end)
            small, idle = (small + gap, idle) if gap <= SMALL_GAP_US else (small, idle + gap)
        busy += max(0.0, start + length - max(start, start if end is None else end))
        end = start + length if end is None else max(end, start + length)
        counts[name] += 1
        times[name] += length
    parts = {"busy_ms": busy, "small_gaps_ms": small, "idle_ms": idle}
    return {
        **{name: round(part / steps / 1e3, 3) for name, part in parts.items()},
        "kernels": round(len(events) / steps),
        "by_name": [
            {"name": name[:NAME], "a_step": round(counts[name] / steps, 1), "us": round(time / steps, 1)}
            for name, time in sorted(times.items(), key=lambda item: -item[1])[:MOST_KERNELS]
        ],
    }
