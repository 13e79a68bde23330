"""Gives an engine's target and drafters their graphs."""

from collections.abc import Sequence

from specdec.draft_heads.draft_graphs import DraftGraphs
from specdec.draft_heads.eagle_drafter import EagleDrafter
from specdec.draft_heads.llama_config import LlamaConfig
from specdec.kernels.attention_plan import Heads
from specdec.kernels.capture import Capture
from specdec.kernels.ragged_rows import WORD_BITS
from specdec.model_runner import ModelRunner
from specdec.step_graphs import StepGraphs


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
        grow, heads = drafters[0].grow, _heads(drafters[0].head.llama, number_bytes)
        graphs = DraftGraphs(grow, capture, heads, max_blocks)
        for drafter in drafters:
            drafter.graphs = graphs


def _heads(config: LlamaConfig, number_bytes: int) -> Heads:
    padded_dim = 1 << (config.head_dim - 1).bit_length()
    return Heads(number_bytes, padded_dim, config.num_heads // config.num_kv_heads, config.num_kv_heads)
