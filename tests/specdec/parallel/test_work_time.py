"""Processor time of a process counts as work, but for what gloo's loops and the thread that watches take."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

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


def take() -> int:
    """Take 0.05 s of processor time; return the number of the thread that did."""
    before = time.thread_time()
    while time.thread_time() < before + 0.05:
        pass
    return threading.get_native_id()


def counted(threads: ThreadPoolExecutor) -> float:
    """Return how much of 0.05 s of another thread counts."""
    start = worked_seconds()
    threads.submit(take).result()
    return worked_seconds() - start


def test_work_counts_and_loops_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(take).result()
        assert counted(threads) > 0.045
        monkeypatch.setattr(work_time, "gloo_loops", lambda: [other])
        assert counted(threads) < 0.04


def test_the_calling_thread_does_not_count() -> None:
    start = worked_seconds()
    take()
    assert worked_seconds() - start < 0.04
