"""Processor time of a process counts as work, but for what gloo's loops take while nothing comes."""

import threading
import time

import pytest
import torch.distributed as dist

from specdec.parallel import work_time
from specdec.parallel.work_time import gloo_loops, worked_seconds


def test_gloo_names_its_loops() -> None:
    """Found by a name that is gloo's own."""
    before = set(gloo_loops())
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    found, end = set[int](), time.monotonic() + 60
    # A loop names itself once it runs.
    while not found and time.monotonic() < end:
        found = set(gloo_loops()) - before
    assert found
    assert all(work_time._seconds_of(thread) < time.process_time() for thread in found)
    del group


def work() -> float:
    """Take 0.05 s of processor time; return how much of it counts."""
    start, before = worked_seconds(), time.thread_time()
    while time.thread_time() < before + 0.05:
        pass
    return worked_seconds() - start


def test_work_counts_and_loops_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert work() > 0.045
    own = threading.get_native_id()
    monkeypatch.setattr(work_time, "gloo_loops", lambda: [own])
    assert work() < 0.04
