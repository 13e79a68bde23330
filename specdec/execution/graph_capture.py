"""Capture of all graphs that steps can ask for, before the first request arrives."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.core.progress import progress_bar
from specdec.draft_heads.drafting.draft_graphs import DraftGraphs, LoopGraphs
from specdec.draft_heads.drafting.drafter import Proposal
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.execution.dummy_rows import dummy_batch, dummy_draft_rows
from specdec.execution.model_runner import ModelRunner
from specdec.kernels.triton.attention_plan import AttentionGeometry, Capture
from specdec.kernels.types.device_tables import DeviceTables
from specdec.kernels.types.integers import ceil_div, next_power_of_2
from specdec.kernels.types.upload import Packet
from specdec.verify.pass_graphs import GraphLimits, PassGraphs

# Limit of the draft probabilities of drawn trees: float32 over the vocabulary for each node that has children. More
# rows than have room are drafted without a graph.
MAX_DRAFT_PROBS_BYTES = 256 << 20
# Cached tokens of the rows that a drafting loop is captured with. No graph depends on them.
DRAFTED_CONTEXT = 1


def capture_passes(runner: ModelRunner, capture: Capture, limits: GraphLimits) -> None:
    """Capture the target's passes, and replay them from now on.

    Args:
        capture: `CudaGraphs.capture` on a GPU.
    """
    cache, config = runner.cache, runner.model.config
    exchange, memory = runner.exchange, partial(torch.zeros, dtype=runner.dtype, device=cache.target.device)
    sent, received = (0, 0) if exchange is None else (exchange.sent, exchange.received)
    output = memory(limits.padded_tokens, sent or config.hidden_size)
    before = memory(limits.padded_tokens, received) if received else None
    geometries = _geometries(config, runner.dtype, config.layer_windows)
    tables = step_tables(limits, cache.block_size, cache.null_block, cache.target.device)
    graphs = runner.graphs = PassGraphs(runner.features, output, geometries, limits, cache.block_size, tables, before)
    keys = graphs.pass_keys()
    with torch.inference_mode(), progress_bar(len(keys), "capturing passes") as advance:
        for key in keys:
            packet = Packet(cache.target.device)
            rows = dummy_batch(cache, limits.rows, key.tokens, key.adapted)
            graphs.capture(key, graphs.pack(packet, *rows), packet, capture)
            advance()


def step_tables(limits: GraphLimits, block_size: int, null_block: int, device: torch.device) -> DeviceTables:
    """Return memory for the block tables of steps, and for those of padding."""
    blocks = max(limits.blocks, ceil_div(PassGraphs.most_padding(), block_size))
    return DeviceTables(limits.rows, blocks, null_block, device)


def capture_drafting(drafter: TreeDrafter[Any], runner: ModelRunner, capture: Capture, limits: GraphLimits) -> None:
    """Capture drafting, and replay it from now on.

    Args:
        capture: `CudaGraphs.capture` on a GPU.
    """
    cache, shape = runner.cache, drafter.shape
    geometries = _geometries(drafter.llama, drafter.dtype, drafter.windows)
    assert runner.graphs is not None
    rest = geometries, runner.graphs.tables, limits.adapters, shape, cache.block_size, drafter.first
    most = next_power_of_2(limits.requests)
    counts = [1 << power for power in reversed(range(most.bit_length()))]
    cases, draw = [(rows, False) for rows in counts], drafter.read_and_draw
    if drafter.proposal == Proposal.DRAWN:
        probs = draft_probs_buffer(drafter, most)
        draw = partial(draw, probs=probs)
        cases += [(rows, True) for rows in counts if rows <= len(probs)]
    drafter.graphs = DraftGraphs(LoopGraphs(drafter.read_and_search, *rest), LoopGraphs(draw, *rest))
    with torch.inference_mode(), progress_bar(len(cases), "capturing drafting") as advance:
        for rows, drawn in cases:
            for adapter in sorted({0, min(1, limits.adapters)}):
                drafter.capture(
                    capture, dummy_draft_rows(cache, rows, DRAFTED_CONTEXT, shape, adapter=adapter), drawn=drawn
                )
            advance()


def draft_probs_buffer(drafter: TreeDrafter[Any], rows: int) -> Tensor:
    """Return memory for the draft probabilities of drawn trees, `[rows, distributions, vocab_size]`.

    Args:
        rows: rows wanted, a power of two; halved while they take more than `MAX_DRAFT_PROBS_BYTES`, down to none.
    """
    dtype = torch.promote_types(drafter.dtype, torch.float32)
    shape = drafter.draw_sizes.num_probs(drafter.shape.depth), drafter.llama.vocab_size
    while rows * shape[0] * shape[1] * dtype.itemsize > MAX_DRAFT_PROBS_BYTES:
        rows //= 2
    return torch.empty(rows, *shape, dtype=dtype, device=drafter.kv.device)


def _geometries(config: LlamaConfig, dtype: torch.dtype, windows: Sequence[int]) -> list[AttentionGeometry]:
    """Return the geometries of layers' attention, one per window."""
    group, dim = config.num_heads // config.num_kv_heads, next_power_of_2(config.head_dim)
    sizes = (dtype.itemsize, dim, group, config.num_kv_heads)
    return [AttentionGeometry(*sizes, window) for window in sorted({*windows})]
