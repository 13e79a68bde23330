"""Captures work on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

# Runs before a capture: kernels are compiled in the first, libraries choose theirs by the second.
WARM_UPS = 2


class CudaGraphs:
    """Graphs that share their memory: only what the last replay has left in it counts."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
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

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
