"""Work in several threads, each of which computes alone, and no more of them than a container has processors."""

import os
import threading
from pathlib import Path

import pytest
import torch

from specdec.kernels.types import threads
from specdec.kernels.types.threads import in_threads, usable_processors, usable_threads


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads as on a large machine."""
    monkeypatch.setattr(threads, "usable_processors", lambda: 64)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("items", [0, 1, 5])
def test_items_are_computed_alone_and_in_order(number: int, items: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        seen = in_threads(lambda item: (item, torch.get_num_threads()), range(items))
        assert seen == [(item, 1) for item in range(items)]
        assert torch.get_num_threads() == number
        with pytest.raises(ZeroDivisionError):
            in_threads(lambda item: 1 // item, [1, 0])
        assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(before)


def test_items_are_computed_side_by_side() -> None:
    before, both = torch.get_num_threads(), threading.Barrier(2, timeout=60)
    torch.set_num_threads(2)
    try:
        in_threads(lambda _: both.wait(), [0, 1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("groups", "files", "want"),
    [
        ("", {}, 64),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "150000 100000"}, 1),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "12800000 100000"}, 64),
        # The path of the host, while the files of the container are at the root.
        ("0::/kubepods/pod1/c2", {"cpu.max": "800000 100000"}, 8),
        # Of all groups that hold it, the least.
        ("0::/a/b", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "600000 200000", "cpu.max": "max 100000"}, 3),
        ("3:cpu,cpuacct:/docker/1", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "1"}, 64),
        ("3:cpu:/d\n1:cpuset:/", {"cpu/d/cpu.cfs_quota_us": "250000", "cpu/d/cpu.cfs_period_us": "100000"}, 2),
        ("3:cpuacct:/d", {"cpuacct/d/cpu.cfs_quota_us": "250000", "cpuacct/d/cpu.cfs_period_us": "100000"}, 64),
        ("0::/", {"cpu.max": "no number"}, 64),
    ],
)
def test_no_more_threads_than_a_container_has_processors(
    groups: str, files: dict[str, str], want: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 threads of 4 processors stood still nine tenths of the time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    groups_of = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": groups, **groups_of}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert usable_processors(tmp_path) == want


def test_threads_of_torch_are_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_processors", lambda: 2)
    before = torch.get_num_threads()
    try:
        for of_torch, want in ((1, 1), (2, 2), (8, 2)):
            torch.set_num_threads(of_torch)
            assert usable_threads() == want
    finally:
        torch.set_num_threads(before)
