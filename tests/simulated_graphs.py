"""CUDA graphs of a simulated GPU: tapes of launches, captured by the rules of CUDA and of torch's allocator."""

import threading
from collections.abc import Callable
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


class SimulatedGraph:
    """A tape of launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.workspaces: list[Workspace] = []

    def replay(self) -> None:
        assert not any(workspace.is_freed for workspace in self.workspaces), "cuBLAS's workspace was freed"
        with torch._C.DisableTorchFunction():
            for launch in self.launches:
                found = tensors_of(launch.work(*launch.args, **launch.settings))
                for place, mine in launch.made.items():
                    mine.copy_(found[place])

    def forget(self) -> None:
        """Overwrite what the capture computed: a real capture computes nothing before its first replay."""
        for made in (made for launch in self.launches for made in launch.made.values()):
            made.fill_(float("nan") if made.is_floating_point() else True if made.dtype == torch.bool else 1 << 20)


class Capture:
    """A capture under way.

    Args:
        mode: whose unsafe calls spoil it: those of all threads ("global"), of its own ("thread_local"), or none
            ("relaxed").
    """

    def __init__(self, graph: SimulatedGraph, pool: Pool, stream: SimulatedStream, mode: str) -> None:
        assert mode in ("global", "thread_local", "relaxed")
        assert not pool.is_freed, "torch refuses a pool whose graphs are all gone"
        self.graph, self.pool, self.stream, self.mode = graph, pool, stream, mode
        self.thread, self.is_spoilt = threading.get_ident(), False
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
