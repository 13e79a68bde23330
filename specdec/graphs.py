"""Gives an engine's target and drafters their graphs."""

from collections.abc import Sequence

from specdec.draft_heads.draft_graphs import DraftGraphs, LoopGraphs
from specdec.draft_heads.eagle_drafter import EagleDrafter
from specdec.draft_heads.llama_config import LlamaConfig
from specdec.kernels.attention_plan import Heads
from specdec.kernels.capture import Capture
from specdec.kernels.ragged_rows import WORD_BITS
from specdec.model_runner import ModelRunner
from specdec.step_graphs import StepGraphs

# Of what a graph's drawn trees were drawn from, float32 over the vocabulary for each node: the graph keeps it for good.
MOST_LAW_BYTES = 256 << 20


def attach_graphs(
    runner: ModelRunner,
    drafters: Sequence[EagleDrafter],
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
        most = MOST_LAW_BYTES // (4 * runner.model.config.vocab_size * first.laws)
        graphs = DraftGraphs(LoopGraphs(first.search, *rest), LoopGraphs(first.draw, *rest), most)
        for drafter in drafters:
            drafter.graphs = graphs


def _heads(config: LlamaConfig, number_bytes: int) -> Heads:
    padded_dim = 1 << (config.head_dim - 1).bit_length()
    return Heads(number_bytes, padded_dim, config.num_heads // config.num_kv_heads, config.num_kv_heads)
