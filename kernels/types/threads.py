"""Limits of torch's threads, and work on a CPU in several threads that do not wait for each other."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    """Return the result of each item, computed in as many threads as torch has, with one thread for each item.

    torch's own threads share each operation, and spin until the next one. For many short operations, and on a machine
    that does other work as well, that takes many times the operations' own time.
    """
    threads = torch.get_num_threads()
    with LimitedThreads(1):
        if threads == 1 or len(items) <= 1:
            return [work(item) for item in items]
        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            return list(pool.map(work, items))
