"""Ranks in threads of the test process: starting a process for each takes seconds, and the code is the same."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specdec.building.rank_process import serve
from specdec.parallel.other_ranks import meet
from specdec.parallel.rank_group import LOOPBACK, file_store


class ThreadRank:
    """A rank in a thread; see `specdec.parallel.other_ranks.Process`. It ends when its connection is closed."""

    def __init__(self, store: str, rank: int) -> None:
        def run() -> None:
            serve(meet(file_store(store), rank, LOOPBACK), end=lambda _: None)
            # The end of a process closes its groups, for which other ranks wait.
            gc.collect()

        self._thread = threading.Thread(target=run, name=f"rank {rank}", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        """Do nothing: the end of its connection ends it."""


@contextmanager
def thread_ranks() -> Iterator[None]:
    """Start ranks as threads meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.parallel.started_ranks.started", ThreadRank)
        yield
