"""Collective operations of the ranks that share one model, on torch.distributed."""

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

# All ranks are on one machine.
LOOPBACK = "127.0.0.1"
# A `torch.distributed.Store`, which torch's annotations do not name.
Store = Any


class RankGroup:
    """Place of one process among the ranks: gloo on CPUs, NCCL on GPUs.

    NCCL was not run: no machine with two GPUs was available.

    All ranks must call the same operations in the same order. An operation ends within `timeout`: it raises a
    RuntimeError if a rank is gone or calls another one. The group is an object rather than torch's default group, so a
    process may hold several.

    Args:
        rank: number of this process.
        size: number of ranks.
        store: key-value store through which the ranks find each other; new for each group.
        timeout: seconds.
    """

    def __init__(self, rank: int, size: int, store: Store, device: torch.device, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._group: Any
        limit = timedelta(seconds=timeout)
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)
        else:
            gloo = cast(Any, dist.ProcessGroupGloo)._Options()
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            gloo._timeout = limit
            self._group = dist.ProcessGroupGloo(store, rank, size, gloo)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace `x` by its sum over all ranks, which is bitwise the same on each of them."""
        assert x.is_contiguous()
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the `x` of each rank; all must have one shape."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        return parts


def file_store(file: str, size: int) -> Store:
    """Return a store in a file, for ranks of one machine."""
    return cast(Any, dist).FileStore(file, size)
