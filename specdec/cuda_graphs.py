"""Captures work on a GPU."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
# Runs before a capture: kernels are compiled in the first, libraries choose theirs by the second.
WARM_UPS = 2


class CudaGraphs:
    """Graphs that share their memory: only what the last replay has left in it counts."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """A graph of `work`, which must wait for nothing and allocate through torch alone; its replay."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = work()

        def replay() -> Result:
            graph.replay()
            return output

        return replay
