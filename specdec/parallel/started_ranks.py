"""Processes of the ranks beside the first, started by it on this machine."""

from pathlib import Path
from tempfile import TemporaryDirectory

from specdec.core.started_module import start_module
from specdec.parallel.other_ranks import OtherRanks, Process
from specdec.parallel.rank_group import LOOPBACK, file_store

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
