"""CUDA graphs of a simulated GPU: tapes of launches, captured by the rules of CUDA and of torch's allocator."""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.simulated_memory import Pool, Workspace
from tests.simulated_streams import SimulatedStream


class Launch(NamedTuple):
    """An operation that a graph repeats at each replay."""

    work: Callable[..., Any]
    args: tuple[Any, ...]
    settings: dict[str, Any]
    made: dict[int, Tensor]


_numbers = itertools.count()


class SimulatedGraph:
    """A tape of launches.

    Attributes:
        number: of its capture, in order.
        pool: the memory that it was captured into.
        spared: addresses of what tensors held there then, which it does not overwrite.
    """

    number: int
    pool: Pool
    spared: set[int]

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.workspaces: list[Workspace] = []

    def replay(self) -> None:
        assert not any(workspace.is_freed for workspace in self.workspaces), "cuBLAS's workspace was freed"
        with torch._C.DisableTorchFunction():
            self._overwrite_others()
            for launch in self.launches:
                found = tensors_of(launch.work(*launch.args, **launch.settings))
                for place, mine in launch.made.items():
                    mine.copy_(found[place])

    def forget(self) -> None:
        """Overwrite what the capture computed: a real capture computes nothing before its first replay."""
        for made in self._made():
            _spoil(made, 1 << 20)

    def _made(self) -> Iterator[Tensor]:
        return (made for launch in self.launches for made in launch.made.values())

    def _overwrite_others(self) -> None:
        """Overwrite what other graphs have made in the pool: memory of theirs may be its own, unless it was in use."""
        for other in self.pool.graphs:
            for made in other._made() if other is not self else ():
                if other.number > self.number or made.untyped_storage().data_ptr() not in self.spared:
                    # Small, as kernels in the interpreter do read where numbers of another graph point to.
                    _spoil(made, 3)


def _spoil(made: Tensor, number: int) -> None:
    made.fill_(float("nan") if made.is_floating_point() else True if made.dtype == torch.bool else number)


class Capture:
    """A capture under way.

    Args:
        alive: addresses of what tensors hold in the pool.
        mode: whose unsafe calls spoil it: those of all threads ("global"), of its own ("thread_local"), or none
            ("relaxed").
    """

    def __init__(self, graph: SimulatedGraph, pool: Pool, alive: set[int], stream: SimulatedStream, mode: str) -> None:
        assert mode in ("global", "thread_local", "relaxed")
        assert not pool.is_freed, "torch refuses a pool whose graphs are all gone"
        self.graph, self.pool, self.stream, self.mode = graph, pool, stream, mode
        self.thread, self.is_spoilt = threading.get_ident(), False
        graph.number, graph.pool, graph.spared = next(_numbers), pool, alive
        pool.was_used = True
        pool.graphs.add(graph)

    @property
    def is_mine(self) -> bool:
        """Return whether this thread captures."""
        return self.thread == threading.get_ident()

    def forbid(self, what: str) -> None:
        """Refuse an unsafe call of this thread, after which the capture fails."""
        if self.mode == "global" or (self.mode == "thread_local" and self.is_mine):
            self.is_spoilt = True
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    def record(self, launch: Launch) -> None:
        assert self.stream.streams.current is self.stream, "an operation on a stream that is not captured"
        self.graph.launches.append(launch)

    def end(self) -> None:
        if self.is_spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")


def tensors_of(found: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
