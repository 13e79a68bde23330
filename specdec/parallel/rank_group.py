"""Operations between the ranks that share one model, on torch.distributed: collectives, and sends to a neighbour."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.parallel.shared_slots import SharedSlots, shared_slots

# Address of ranks that are all on one machine.
LOOPBACK = "127.0.0.1"
# Seconds in which ranks on GPUs connect to each other.
CONNECT_TIMEOUT = 600.0
# A `torch.distributed.Store`, which torch's annotations do not name.
Store = Any


class RankGroup:
    """Place of one process among the ranks: on CPUs gloo, and shared memory on one machine; NCCL on GPUs.

    NCCL was not run: no machine with two GPUs was available. CUDA graphs hold its collectives, which are launches like
    others.

    All ranks must call the same collectives in the same order. An operation ends within `timeout`: it raises a
    RuntimeError if a rank is gone, stuck, or calls another one. With NCCL a watchdog ends the process instead; it does
    not watch collectives that a graph replays. The group is an object rather than torch's default group, so a
    process may hold several.

    Args:
        rank: number of this process.
        size: number of ranks.
        store: key-value store through which the ranks find each other; new for each group.
        timeout: seconds.
        host: address of this machine that the other ranks reach.
        connects: connect ranks on GPUs now rather than with their first operation, since that takes seconds, which
            `timeout` may not leave.

    Attributes:
        is_waiting: whether this process waits for another one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        device: torch.device,
        timeout: float,
        host: str = LOOPBACK,
        *,
        connects: bool = False,
    ) -> None:
        self.rank, self.size, self.is_waiting = rank, size, False
        # Sends that may not have ended, with the tensors that they read.
        self._sends: list[tuple[Any, Tensor]] = []
        self._group: Any
        self._slots: SharedSlots | None = None
        limit = timedelta(seconds=timeout)
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            connects = connects and size > 1
            nccl._timeout = timedelta(seconds=CONNECT_TIMEOUT) if connects else limit
            self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)
            if connects:
                self.all_reduce(torch.zeros(1, device=device))
                torch.cuda.synchronize(device)
                self._group._set_default_timeout(limit)
        else:
            gloo = cast(Any, dist.ProcessGroupGloo)._Options()
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            gloo._timeout = limit
            self._group = dist.ProcessGroupGloo(store, rank, size, gloo)
            if size > 1:
                self._slots = shared_slots(rank, size, store, timeout)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace `x` by its sum over all ranks, which is bitwise the same on each of them."""
        assert x.is_contiguous()
        with self._waiting():
            if self._slots is not None:
                self._slots.all_reduce(x)
            else:
                self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the `x` of each rank; all must have one shape."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._waiting():
            if self._slots is not None:
                self._slots.all_gather(x, parts)
            else:
                self._group.allgather([parts], [x]).wait()
        return parts

    def send(self, x: Tensor, rank: int) -> None:
        """Send a tensor, which must not be written before `flush`, without waiting for the rank to receive it."""
        self._sends.append((self._group.send([x], rank, 0), x))

    def flush(self) -> None:
        """Wait until all that was sent has been received."""
        with self._waiting():
            for work, _ in self._sends:
                work.wait()
        self._sends.clear()

    def receive(self, x: Tensor, rank: int) -> Tensor:
        """Replace `x` by the next tensor that a rank sends, which must have its shape and dtype."""
        with self._waiting():
            self._group.recv([x], rank, 0).wait()
        return x

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False


def lone_group(device: torch.device) -> RankGroup:
    """Return a group of this process alone."""
    return RankGroup(0, 1, cast(Any, dist).HashStore(), device, timeout=1)


def file_store(file: str) -> Store:
    """Return a store in a file, for ranks of one machine."""
    return cast(Any, dist).FileStore(file)


def part_of(store: Store, name: str) -> Store:
    """Return a part of a store, for one group of several that share it."""
    return cast(Any, dist).PrefixStore(name, store)
