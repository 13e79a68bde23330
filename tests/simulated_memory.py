"""Memory of a simulated GPU: what tensors take, and the pools of graphs, as torch's caching allocator has them."""

import weakref
from typing import Any

from torch import Tensor


class Pool:
    """Memory that graphs share: it grows to the most that is in use at once, and goes with the last graph.

    Attributes:
        in_use: bytes of tensors that are alive.
        reserved: bytes taken from the device.
        graphs: the graphs captured into it that are alive.
        was_used: whether any was captured into it.
    """

    def __init__(self) -> None:
        self.in_use = self.reserved = 0
        self.graphs = weakref.WeakSet[Any]()
        self.was_used = False

    def take(self, size: int) -> None:
        self.in_use += size
        self.reserved = max(self.reserved, self.in_use)

    def give_back(self, size: int) -> None:
        self.in_use -= size

    @property
    def is_freed(self) -> bool:
        """Return whether its last graph is gone; what tensors hold of it then keeps it from being used again."""
        return self.was_used and not self.graphs


class Memory:
    """The memory of a device.

    Attributes:
        general: memory outside of graphs.
        most_graphs: the most graphs that there were at once.
    """

    def __init__(self) -> None:
        self.general, self.most_graphs = Pool(), 0
        self._pools: dict[object, Pool] = {}
        # By the address of the numbers: the pool, bytes, and how many tensors share them.
        self._storages: dict[int, tuple[Pool, int, int]] = {}

    def pool(self, handle: object) -> Pool:
        """Return the pool of a handle."""
        return self._pools.setdefault(handle, Pool())

    @property
    def in_graphs(self) -> int:
        """Bytes that pools of graphs hold."""
        self.empty_cache()
        return sum(pool.reserved for pool in self._pools.values())

    @property
    def reserved(self) -> int:
        """Bytes taken: of tensors outside of graphs, and of pools."""
        return self.general.in_use + self.in_graphs

    def hold(self, tensor: Any, raw: Tensor, pool: Pool) -> None:
        """Count a tensor's numbers until the last tensor that shares them is gone."""
        address, size = raw.untyped_storage().data_ptr(), raw.untyped_storage().nbytes()
        if not size:
            return
        owner, _, count = self._storages.get(address, (pool, size, 0))
        if not count:
            owner.take(size)
        self._storages[address] = owner, size, count + 1
        weakref.finalize(tensor, self._let_go, address).atexit = False

    def alive_in(self, pool: Pool) -> set[int]:
        """Return the addresses of the numbers that tensors hold in a pool."""
        return {address for address, (owner, _, _) in self._storages.items() if owner is pool}

    def holds(self, raw: Tensor) -> bool:
        """Return whether these numbers are counted."""
        return raw.untyped_storage().data_ptr() in self._storages

    def _let_go(self, address: int) -> None:
        owner, size, count = self._storages.pop(address)
        if count > 1:
            self._storages[address] = owner, size, count - 1
        else:
            owner.give_back(size)

    def count_graphs(self) -> None:
        """Count the graphs that are there."""
        self.most_graphs = max(self.most_graphs, sum(len(pool.graphs) for pool in self._pools.values()))

    def empty_cache(self) -> None:
        """Give back the pools whose graphs are gone."""
        for handle, pool in list(self._pools.items()):
            if pool.is_freed and not pool.in_use:
                del self._pools[handle]


PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "matmul", "__matmul__", "__rmatmul__", "linear", "einsum", "addbmm"}


class Workspace:
    """Memory of cuBLAS for the products of a stream, taken where the first of them runs.

    Args:
        pool: the pool of the graph that is being captured then; None outside of captures.
    """

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool

    @property
    def is_freed(self) -> bool:
        """Return whether the graphs that it lies in the memory of are gone."""
        return self._pool is not None and self._pool.is_freed


def is_product(function: Any) -> bool:
    """Return whether an operation of torch calls cuBLAS."""
    return getattr(function, "__name__", "") in PRODUCTS
