"""Gives an engine's target and drafters their graphs."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from specdec.draft_heads.drafting.draft_graphs import DraftGraphs, LoopGraphs
from specdec.draft_heads.drafting.model_drafter import ModelDrafter
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.execution.model_runner import ModelRunner
from specdec.execution.step_graphs import StepGraphs
from specdec.kernels.attention_plan import AttentionGeometry
from specdec.kernels.plan_buffer import Capture
from specdec.kernels.ragged_rows import WORD_BITS

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


# Of what a graph's drawn trees were drawn from, float32 over the vocabulary for each node: the graph keeps it for good.
MAX_DRAFT_PROBS_BYTES = 256 << 20


def attach_graphs(
    runner: ModelRunner,
    drafters: Sequence[ModelDrafter],
    capture: Capture,
    max_rows: int,
    entries: int,
) -> None:
    """From now on, passes and drafting are captured and replayed.

    Args:
        drafters: of one head and its cache.
        capture: `CudaGraphs.capture` on a GPU.
        max_rows: requests of a step.
        entries: of a request in the cache at most, its drafts included.
    """
    cache = runner.cache
    max_blocks = -(-entries // cache.block_size)
    nodes = max((drafter.shape.slots for drafter in drafters), default=0)
    words = max(1, -(-nodes // WORD_BITS))
    number_bytes = cache.target.element_size()
    heads = _heads(runner.model.config, number_bytes)
    runner.graphs = StepGraphs(runner.features, capture, heads, max_rows, max_blocks, words)
    if drafters:
        first = drafters[0]
        rest = (capture, _heads(first.head.llama, number_bytes), max_blocks)
        most = MAX_DRAFT_PROBS_BYTES // (4 * runner.model.config.vocab_size * first.num_draft_probs)
        graphs = DraftGraphs(LoopGraphs(first.search, *rest), LoopGraphs(first.draw, *rest), most)
        for drafter in drafters:
            drafter.graphs = graphs


def _heads(config: LlamaConfig, number_bytes: int) -> AttentionGeometry:
    padded_dim = 1 << (config.head_dim - 1).bit_length()
    return AttentionGeometry(number_bytes, padded_dim, config.num_heads // config.num_kv_heads, config.num_kv_heads)
