"""Ranks that torchrun or another launcher has started, on one machine or several. Rank 0 runs the program."""

from datetime import timedelta
from typing import Any, cast

from torch.distributed.rendezvous import rendezvous

from specdec.core.launch import Launch
from specdec.parallel.met_ranks import MEETING_TIMEOUT, MetRanks, meet
from specdec.parallel.rank_group import Store
from specdec.parallel.ranks import OtherRank
from specdec.parallel.started_ranks import Process


class LaunchedRanks(MetRanks):
    """Ranks that wait for this one; see `OtherRanks`.

    Args:
        timeout: seconds for a rank to take a message.

    Raises:
        ValueError: they serve another engine, or have served one.
        TimeoutError: some did not come.
    """

    def __init__(self, launch: Launch, timeout: float) -> None:
        super().__init__(_store(launch), launch.size, timeout)
        self.processes: list[Process] = [_Elsewhere()] * (launch.size - 1)


class _Elsewhere:
    """A process of the launcher. It ends with its connection, and nothing else is known of it."""

    def poll(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
        return 0

    def kill(self) -> None: ...


def met_rank(launch: Launch) -> OtherRank:
    """Return this rank, once rank 0 is there."""
    return meet(_store(launch), launch.rank, launch.address)


def _store(launch: Launch) -> Store:
    """Return the launcher's store, or one that rank 0 offers at MASTER_PORT."""
    limit = timedelta(seconds=MEETING_TIMEOUT)
    found = cast(Any, rendezvous)("env://", launch.rank, launch.size, timeout=limit)
    store, _, _ = next(found)
    store.set_timeout(limit)
    return store
