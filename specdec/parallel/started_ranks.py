"""Processes of the ranks beside the first: started by it on this machine, or by torchrun or another launcher.

A launcher starts ranks on one machine or several, and rank 0 runs the program.
"""

from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from torch.distributed.rendezvous import rendezvous

from specdec.core.launch import Launch
from specdec.core.started_module import start_module
from specdec.parallel.other_ranks import MEETING_TIMEOUT, OtherRanks, Process, meet
from specdec.parallel.rank_group import LOOPBACK, Store, file_store
from specdec.parallel.ranks import OtherRank

# Module of a rank's process. By name, as it builds the engine, which is above this room.
RANK_PROCESS = "specdec.building.rank_process"


def started_ranks(size: int, timeout: float) -> OtherRanks:
    """Return processes on this machine. They find this one by a file in a folder of this user alone.

    Args:
        size: number of all ranks.
        timeout: seconds for a rank to take a message.
    """
    folder = TemporaryDirectory(prefix="specdec-ranks-")
    file = str(Path(folder.name) / "store")
    store = file_store(file)
    processes = [started(file, rank) for rank in range(1, size)]
    return OtherRanks(store, processes, timeout, folder.cleanup, LOOPBACK)


def started(store: str, rank: int) -> Process:
    """Start a rank. Ctrl-C in a terminal reaches the first rank alone.

    Args:
        store: file through which the ranks find each other.
    """
    return start_module(RANK_PROCESS, store, str(rank))


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
