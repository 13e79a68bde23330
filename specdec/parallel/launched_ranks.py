"""Ranks that torchrun or another launcher has started, on one machine or several. Rank 0 runs the program."""

from datetime import timedelta
from typing import Any, cast

from torch.distributed.rendezvous import rendezvous

from specdec.core.launch import Launch
from specdec.parallel.other_ranks import MEETING_TIMEOUT, OtherRanks, meet
from specdec.parallel.rank_group import Store
from specdec.parallel.ranks import OtherRank


def launched_ranks(launch: Launch, timeout: float) -> OtherRanks:
    """Return the ranks that wait for this one; see `OtherRanks` for the errors raised.

    Args:
        timeout: seconds for a rank to take a message.
    """
    return OtherRanks(_store(launch), [_Elsewhere()] * (launch.size - 1), timeout)


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
