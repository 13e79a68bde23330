"""One pass of a block head over many blocks of packed conversations, as training and accuracy need it."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdec.draft_heads.heads.block_attention import BlockAttention, block_mask, block_positions
from specdec.draft_heads.heads.block_head import BlockForm
from specdec.draft_heads.llama.rope import Rotary, rotary_at
from specdec.train_eagle.passes.features import FeatureBatch

# Blocks that attend in one call: more cost masked products among blocks, fewer cost calls.
GROUP = 16


class BlockGroup(NamedTuple):
    """Some blocks of one conversation.

    Attributes:
        conversation: number of the conversation.
        anchors: int64, places of the blocks' anchors in it, ascending.
        seen: number of its tokens up to the last anchor.
    """

    conversation: int
    anchors: Tensor
    seen: int


def block_groups(lengths: Sequence[int], anchors: Tensor) -> list[BlockGroup]:
    """Return the blocks of each conversation, at most `GROUP` at once.

    Args:
        lengths: number of tokens of each conversation.
        anchors: int64 `[blocks]`, ascending, places of the anchors among the packed tokens.
    """
    starts = list(accumulate(lengths, initial=0))
    places = anchors.tolist()
    bounds = [bisect_left(places, start) for start in starts]
    return [
        BlockGroup(number, anchors[first:last] - starts[number], places[last - 1] - starts[number] + 1)
        for number, (begin, end) in enumerate(pairwise(bounds))
        for first in range(begin, end, GROUP)
        for last in (min(first + GROUP, end),)
    ]


class PackedBlockAttention:
    """Attention of one layer over the blocks of packed conversations, group by group.

    Args:
        context: `[tokens, 2 * kv_heads, head_dim]`, this layer's part of `BlockForm.context`.
        rotary: of the tokens' positions.
        lengths: number of tokens of each conversation.
        groups: the blocks, in their order.
        masks: `block_mask` of each group.
        block_size: rows of a block.
    """

    def __init__(
        self,
        context: Tensor,
        rotary: Rotary,
        lengths: Sequence[int],
        groups: Sequence[BlockGroup],
        masks: Sequence[Tensor],
        block_size: int,
    ) -> None:
        # Split, since the gradient of a slice is as large as the whole.
        self.contexts, self.rotaries = torch.split(context, list(lengths)), _split(rotary, lengths)
        self.groups, self.masks = groups, masks
        self.rows = [len(group.anchors) * block_size for group in groups]

    def __call__(self, qkv: Tensor, rotary: Rotary, num_heads: int) -> Tensor:
        """Attend as `Attention` describes, without changing `qkv`."""
        mixed = []
        parts = zip(self.groups, self.masks, torch.split(qkv, self.rows), _split(rotary, self.rows), strict=True)
        for group, mask, rows, positions in parts:
            cos, sin = self.rotaries[group.conversation]
            seen = self.contexts[group.conversation][: group.seen]
            attention = BlockAttention(seen, (cos[: group.seen], sin[: group.seen]), mask)
            mixed.append(attention(rows, positions, num_heads))
        return torch.cat(mixed) if mixed else qkv[:, :num_heads]


def _split(rotary: Rotary, rows: Sequence[int]) -> list[Rotary]:
    cos, sin = rotary
    return list(zip(torch.split(cos, list(rows)), torch.split(sin, list(rows)), strict=True))


def slot_states(
    head: BlockForm, batch: FeatureBatch, anchors: Tensor, table: Tensor, *, checkpoints: bool = False
) -> Tensor:
    """Return the normed states of the slots behind anchors, `[anchors, slots, hidden_size]`.

    Args:
        anchors: int64 `[anchors]`, ascending, their places among the batch's tokens.
        table: the head's rotary table.
        checkpoints: whether the layers are run again for their gradient, to save memory.
    """
    config, device, size = head.config, anchors.device, head.config.block_size
    positions = torch.cat([torch.arange(length, device=device) for length in batch.lengths])
    context = head.context(batch.read_by(head))
    groups, of_context = block_groups(batch.lengths, anchors), rotary_at(table, positions)
    kinds = list(zip(config.causal, head.llama.layer_windows, strict=True))
    masks = {
        (causal, window): [
            block_mask(positions.new_zeros(group.seen), group.anchors, size, causal=causal, window=window)
            for group in groups
        ]
        for causal, window in set(kinds)
    }
    attentions = [
        PackedBlockAttention(context[:, layer], of_context, batch.lengths, groups, masks[kind], size)
        for layer, kind in enumerate(kinds)
    ]
    tokens = torch.full((len(anchors), size), config.mask_token, device=device)
    tokens[:, 0] = batch.tokens[anchors]
    rotary = rotary_at(table, block_positions(positions[anchors], size).clamp_max(len(table) - 1))
    inputs = tokens.flatten(), rotary, attentions
    hidden: Tensor = checkpoint(head, *inputs, use_reentrant=False) if checkpoints else head(*inputs)
    return hidden.view(len(anchors), size, head.llama.hidden_size)[
        :, config.first_row : config.first_row + config.num_slots
    ]


def tokens_before(batch: FeatureBatch, anchors: Tensor, slots: int) -> Tensor:
    """Return the token before each slot, int64 `[anchors, slots]`; past the batch's end, its last one."""
    places = anchors[:, None] + torch.arange(slots, device=anchors.device)
    return batch.tokens[places.clamp_max(len(batch.tokens) - 1)]
