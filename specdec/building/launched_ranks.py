"""Ranks that torchrun or another launcher has started, on one machine or several. Rank 0 runs the program."""

import os
import signal
from datetime import timedelta
from typing import Any, NoReturn, cast

from torch.distributed.rendezvous import rendezvous

from specdec.building.follower import Follower
from specdec.building.met_ranks import MEETING_TIMEOUT, MetRanks, meet
from specdec.building.started_ranks import Process
from specdec.core.launch import Launch
from specdec.parallel.rank_group import Store


class LaunchedRanks(MetRanks):
    """Ranks that wait for this one; see `OtherRanks`.

    Args:
        timeout: seconds for a follower to take a message.

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


def follow(launch: Launch) -> NoReturn:
    """Be a rank beside the first, to the end of this process."""
    # Ctrl-C in a terminal is for the first rank, with which this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    met_follower(launch).run()
    # As in `follower.main`.
    os._exit(0)


def met_follower(launch: Launch) -> Follower:
    """Return the follower of this rank, once rank 0 is there."""
    return meet(_store(launch), launch.rank, launch.address)


def _store(launch: Launch) -> Store:
    """Return the launcher's store, or one that rank 0 offers at MASTER_PORT."""
    limit = timedelta(seconds=MEETING_TIMEOUT)
    found = cast(Any, rendezvous)("env://", launch.rank, launch.size, timeout=limit)
    store, _, _ = next(found)
    store.set_timeout(limit)
    return store
