"""A block head over a paged cache that is NaN where nothing was written, as the drafter runs it."""

import torch
from torch import Tensor

from specdec.draft_heads.heads.block_head import BlockForm
from specdec.draft_heads.llama.llama_layer import PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.block_table import pad_block_tables
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.verify.tree_batch import slots_of
from tests.kernel_sets import TORCH
from tests.strategies import shuffled_tables

BLOCK = 8


def served_states(head: BlockForm, tokens: list[int], features: Tensor, kernels: KernelSet = TORCH) -> Tensor:
    """Return the normed states of the block whose anchor is the last token, `[block_size, hidden_size]`.

    Args:
        features: `[tokens - 1, hidden_size]`.
    """
    llama, config, known = head.llama, head.config, len(tokens)
    plan = shuffled_tables([known + config.block_size], BLOCK, known)
    table = plan.tables[0]
    shape = (llama.num_layers, plan.num_blocks * BLOCK, 2 * llama.num_kv_heads, llama.head_dim)
    cache = torch.full(shape, float("nan"), dtype=features.dtype)
    rope = llama.rope.table(llama.head_dim, llama.max_position, features.dtype)
    slots = torch.tensor(slots_of(table, 1, known, BLOCK), dtype=torch.int64)
    rotary = rotary_at(rope, torch.arange(known - 1))
    for layer, stored in zip(cache, head.context(features).unbind(1), strict=True):
        kernels.rotary_store(stored, *rotary, layer, slots, 0, None, None)
    size = config.block_size
    slots = torch.tensor(slots_of(table, known, known + size, BLOCK))
    ways = []
    for causal in (False, True):
        bits = [(2 << row) - 1 if causal else (1 << size) - 1 for row in range(size)]
        ways.append(
            RaggedRows(
                query_lens=[size],
                lengths=[known + size],
                tree_starts=[known],
                block_tables=torch.tensor(pad_block_tables([table]), device=slots.device),
                visible=torch.full((size,), known),
                ancestors=torch.tensor(bits)[:, None],
                block_size=BLOCK,
                first=1,
            )
        )
    attentions = [
        PagedAttention(kv, slots, ways[causal], kernels, window)
        for kv, causal, window in zip(cache, config.causal, head.windows, strict=True)
    ]
    rows = torch.tensor([tokens[-1], *[config.mask_token] * (size - 1)])
    return head(rows, rotary_at(rope, known - 1 + torch.arange(size)), attentions)
