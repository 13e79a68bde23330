"""Time marks on a device, taken without waiting for it."""

import time
from collections.abc import Callable

import torch

# Seconds of the host's clock, or an event on a GPU, which runs behind the host.
Mark = float | torch.cuda.Event


def clock_of(device: torch.device) -> Callable[[], Mark]:
    """Return what marks the moment when the device has finished all work queued so far."""
    return _event if device.type == "cuda" else time.perf_counter


def _event() -> Mark:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds between two marks, both of which must have passed."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return float(start.elapsed_time(end)) / 1e3
