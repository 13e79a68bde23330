"""Ranks in threads of the test process: starting a process for each takes seconds, and the code is the same."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from specdec.building.rank_process import serve
from specdec.parallel.rank_group import file_store
from specdec.parallel.ranks import OtherRank


class ThreadRank:
    """A rank in a thread; see `specdec.parallel.started_ranks.Process`. It ends when its connection is closed."""

    def __init__(self, descriptor: int, store: str, rank: int) -> None:
        other = OtherRank(Connection(os.dup(descriptor)), file_store(store), rank)
        self._thread = threading.Thread(target=serve, args=(other,), name=f"rank {rank}", daemon=True)
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
        patch.setattr("specdec.parallel.started_ranks.launched", ThreadRank)
        yield
