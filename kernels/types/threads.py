"""Limits of torch's threads, and work on a CPU in several threads that do not wait for each other."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_processors(root: Path = Path("/")) -> int:
    """Return the number of processors that this process may use.

    Threads that spin beyond the quota of a container (`docker run --cpus`, a Kubernetes limit) use it up, and then all
    of them are stopped for most of each period. What a quota has beyond whole processors is left to other threads.

    Args:
        root: the folder of the file system's root.
    """
    # Not every system has affinities.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas(root))]))


def usable_threads() -> int:
    """Return torch's number of threads, within the processors that this process may use."""
    return min(torch.get_num_threads(), usable_processors())


def _quotas(root: Path) -> Iterator[float]:
    """Yield the number of processors that each control group of the process allows (cgroups v1 and v2)."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for number, controllers, path in (line.split(":", 2) for line in groups if line.count(":") > 1):
        own = Path(path.strip("/"))
        # A container may see its own group as the root, with or without seeing its path.
        for folder in (own, *own.parents):
            try:
                if number == "0":
                    quota, period = (root / "sys/fs/cgroup" / folder / "cpu.max").read_text().split()
                elif "cpu" in controllers.split(","):
                    group = root / "sys/fs/cgroup" / controllers / folder
                    quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    break
                # No quota is "max", or -1.
                if quota != "max" and int(quota) > 0:
                    yield int(quota) / int(period)
            except (OSError, ValueError):
                continue


class LimitedThreads:
    """A context that limits torch's threads; None sets no limit. It may be entered again once it is left."""

    def __init__(self, most: int | None) -> None:
        self.most, self._before = most, 0

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self.most is not None and self._before > self.most:
            torch.set_num_threads(self.most)

    def __exit__(self, *_: object) -> None:
        if self.most is not None and self._before > self.most:
            torch.set_num_threads(self._before)


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the result of each item, computed in `usable_threads()`, with one thread for each item.

    torch's own threads share each operation, and spin until the next one. For many short operations, and on a machine
    that does other work as well, that takes many times the operations' own time.
    """
    threads = usable_threads()
    with LimitedThreads(1):
        if threads == 1 or len(items) <= 1:
            return [work(item) for item in items]
        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            return list(pool.map(work, items))
