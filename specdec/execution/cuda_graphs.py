"""Capture of CUDA graphs."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
# Runs before a capture: the first compiles kernels, and libraries have chosen theirs by the second.
WARM_UPS = 2


class CudaGraphs:
    """Capture of an engine's CUDA graphs, which share one memory pool: a graph overwrites the temporaries of others.

    Warm-ups and captures run on one stream. cuBLAS has a workspace for each stream, allocated at the stream's first
    product: here in the first warm-up, outside of the graphs' memory, so that it outlives every graph.

    Attributes:
        num_captures: graphs captured so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_captures = device, 0
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._alive = weakref.WeakSet[torch.cuda.CUDAGraph]()

    def capture(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Capture `work`, which must wait for nothing and allocate through torch alone; return its replay."""
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    work()
            torch.cuda.current_stream().wait_stream(self._stream)
            if not self._alive:
                # Torch frees a pool with its last graph.
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads may ask for events meanwhile, as those of connectors and of NCCL do.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = work()
        self._alive.add(graph)
        self.num_captures += 1

        def replay() -> Result:
            graph.replay()
            return output

        return replay

    def release(self) -> None:
        """Free the memory of dropped graphs, before others are captured."""
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
