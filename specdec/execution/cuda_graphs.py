"""CUDA graphs of the target's pass and of the drafting loops."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from specdec.draft_heads.drafting.draft_graphs import DraftGraphs, LoopGraphs
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.execution.model_runner import ModelRunner
from specdec.execution.step_graphs import StepGraphs
from specdec.kernels.attention_plan import AttentionGeometry
from specdec.kernels.integers import ceil_div, next_power_of_2
from specdec.kernels.plan_buffer import Capture
from specdec.kernels.ragged_rows import WORD_BITS

Result = TypeVar("Result")
# Runs before a capture: the first compiles kernels, and libraries have chosen theirs by the second.
WARM_UPS = 2


class CudaGraphs:
    """Graphs that share their memory, so that only the output of the last replay is valid."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Capture `work`, which must wait for nothing and allocate through torch alone; return its replay."""
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


# Limit of the draft probabilities that a graph of drawn trees keeps: float32 over the vocabulary for each node.
MAX_DRAFT_PROBS_BYTES = 256 << 20


def attach_graphs(
    runner: ModelRunner, drafter: TreeDrafter[Any] | None, capture: Capture, max_rows: int, entries: int
) -> None:
    """Capture and replay passes and drafting from now on.

    Args:
        capture: `CudaGraphs.capture` on a GPU.
        max_rows: limit of a step's requests.
        entries: limit of a request's cache entries, its drafts included.
    """
    max_blocks = ceil_div(entries, runner.cache.block_size)
    nodes = drafter.shape.slots if drafter is not None else 0
    words = max(1, ceil_div(nodes, WORD_BITS))
    target = runner.model.config
    geometries = _geometries(target, runner.dtype, target.layer_windows)
    runner.graphs = StepGraphs(runner.features, capture, geometries, max_rows, max_blocks, words)
    if drafter is not None:
        rest = (capture, _geometries(drafter.llama, drafter.dtype, drafter.windows), max_blocks)
        most = MAX_DRAFT_PROBS_BYTES // (4 * runner.model.config.vocab_size * drafter.num_draft_probs)
        drafter.graphs = DraftGraphs(LoopGraphs(drafter.search, *rest), LoopGraphs(drafter.draw, *rest), most)


def _geometries(config: LlamaConfig, dtype: torch.dtype, windows: Sequence[int]) -> list[AttentionGeometry]:
    """Return the geometries of layers' attention, one per window."""
    group, dim = config.num_heads // config.num_kv_heads, next_power_of_2(config.head_dim)
    sizes = (dtype.itemsize, dim, group, config.num_kv_heads)
    return [AttentionGeometry(*sizes, window) for window in sorted({*windows})]
