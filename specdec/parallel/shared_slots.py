"""Collectives of ranks on one machine, through memory that they share.

A message of gloo takes several threads of each rank, which wake each other up: hundreds of microseconds, where a small
model's layer takes ten.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import torch
from torch import Tensor

from specdec.kernels.native.barrier import Barrier

# Files that are memory.
FOLDER = Path("/dev/shm")
# Bytes of a slot, and of a rank's counter before its two slots.
SLOT, HEAD = 1 << 18, 1 << 12
# Seconds after which a rank that waits looks whether the others are there.
LOOK = 0.1


class SharedSlots:
    """Memory of ranks on one machine: a file of each, with a counter and two slots, which all others read.

    A rank writes its part of an operation into one of its slots, waits until all have written theirs, and reads them.
    It writes the other slot next, and the first one again once all have written their other slot, and so have read the
    first one.

    Args:
        rank: number of this one.
        files: of all ranks, each opened by this one; its own is locked, until it is closed or this process ends.
        timeout: seconds in which all ranks must come to an operation.
    """

    def __init__(self, rank: int, files: list[IO[bytes]], timeout: float) -> None:
        self._rank, self._files, self._timeout, self._number = rank, files, timeout, 0
        self._memory = [
            torch.frombuffer(mmap.mmap(file.fileno(), HEAD + 2 * SLOT), dtype=torch.uint8) for file in files
        ]
        counters = [memory.data_ptr() for memory in self._memory]
        self._barrier = Barrier(counters.pop(rank), counters)
        # Of each dtype: the slots of all ranks that are written in turn.
        self._slots: dict[torch.dtype, list[list[Tensor]]] = {}

    def all_reduce(self, x: Tensor) -> None:
        """Replace `x`, contiguous, by its sum over all ranks, summed in the order of ranks."""
        for own, slots in self._exchanged(x):
            torch.add(slots[0], slots[1], out=own)
            for slot in slots[2:]:
                own.add_(slot)

    def all_gather(self, x: Tensor, parts: list[Tensor]) -> None:
        """Write `x`, contiguous, of each rank into its part."""
        place = 0
        for own, slots in self._exchanged(x):
            for part, slot in zip(parts, slots, strict=True):
                part.view(-1)[place : place + len(own)].copy_(slot)
            place += len(own)

    def _exchanged(self, x: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield parts of `x`, each with the same part of every rank's."""
        if x.dtype not in self._slots:
            self._slots[x.dtype] = [
                [memory[start : start + SLOT].view(x.dtype) for memory in self._memory] for start in (HEAD, HEAD + SLOT)
            ]
        flat, most = x.view(-1), SLOT // x.element_size()
        for start in range(0, len(flat), most):
            own = flat[start : start + most]
            slots = [slot[: len(own)] for slot in self._slots[x.dtype][self._number % 2]]
            slots[self._rank].copy_(own)
            self._meet()
            yield own, slots

    def _meet(self) -> None:
        """Wait until all ranks have written.

        Raises:
            RuntimeError: one is gone, or does not come in time.
        """
        self._number += 1
        if self._barrier.wait(self._number, LOOK):
            return
        end = time.monotonic() + self._timeout - LOOK
        while not self._barrier.wait(self._number, LOOK):
            for rank, file in enumerate(self._files):
                if rank != self._rank and _is_unlocked(file):
                    raise RuntimeError(f"rank {rank} has closed its memory")
            if time.monotonic() > end:
                raise RuntimeError(f"timeout: not all ranks came to an operation in {self._timeout:g} seconds")


def shared_slots(rank: int, size: int, store: Any, timeout: float) -> SharedSlots | None:
    """Return the slots of ranks that are all there, None if some cannot reach each other's or lack the library.

    Args:
        store: key-value store that all ranks reach.
    """
    own = _slot_file()
    try:
        store.set(f"slots-{rank}", own.name if own else "")
        names = [store.get(f"slots-{other}").decode() for other in range(size)]
        slots = None
        if all(names):
            with suppress(OSError, ValueError):
                slots = SharedSlots(
                    rank, [own if own and name == own.name else _opened(name) for name in names], timeout
                )
        store.set(f"has-slots-{rank}", "yes" if slots else "")
        are_shared = [bool(store.get(f"has-slots-{other}")) for other in range(size)]
    finally:
        if own is not None:
            os.unlink(own.name)
    return slots if all(are_shared) else None


def _opened(name: str) -> IO[bytes]:
    return open(name, "r+b")


def _slot_file() -> IO[bytes] | None:
    """Return a new file of a rank, locked; None where there is no memory for files."""
    with suppress(OSError):
        file = NamedTemporaryFile(prefix="specdec-rank-", dir=FOLDER, delete=False)  # noqa: SIM115 (as above)
        try:
            # Memory that is short is noticed here, not when it is written.
            os.posix_fallocate(file.fileno(), 0, HEAD + 2 * SLOT)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            os.unlink(file.name)
            raise
        return file
    return None


def _is_unlocked(file: IO[bytes]) -> bool:
    """Return whether the rank that locked a file has closed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True
