"""Attention of block heads over whole conversations: many blocks at once, under a dense mask. Training uses it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.draft_heads.llama.rope import Rotary


class BlockAttention:
    """Attention of one layer of packed blocks to context rows and to their own blocks; differentiable.

    Args:
        context: `[context rows, 2 * kv_heads, head_dim]`, this layer's part of `BlockForm.context`, keys not rotated.
        rotary: of the context rows' positions.
        mask: bool `[block rows, context rows + block rows]`, see `block_mask`.
    """

    def __init__(self, context: Tensor, rotary: Rotary, mask: Tensor) -> None:
        keys, values = context.chunk(2, 1)
        self.keys, self.values, self.mask = rotated(keys, rotary), values, mask

    def __call__(self, qkv: Tensor, rotary: Rotary, num_heads: int) -> Tensor:
        """Attend as `Attention` describes, without changing `qkv`."""
        kv_heads = self.keys.shape[1]
        query, key, value = qkv.split_with_sizes((num_heads, kv_heads, kv_heads), 1)
        keys = torch.cat([self.keys, rotated(key, rotary)])
        parts = (rotated(query, rotary), keys, torch.cat([self.values, value]))
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=num_heads > kv_heads)
        return mixed[0].transpose(0, 1)


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary position embedding to `[rows, heads, head_dim]`, halves convention, in the type of `x`."""
    cos, sin = rotary
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Return the places of blocks' rows, int64 `[blocks * block_size]`: from each anchor's (int64 `[blocks]`) on."""
    return (anchors[:, None] + torch.arange(block_size, device=anchors.device)).flatten()


def block_mask(documents: Tensor, anchors: Tensor, block_size: int, *, causal: bool, window: int = 0) -> Tensor:
    """Return which keys the rows of blocks see, bool `[blocks * block_size, context + blocks * block_size]`.

    A row sees the context rows of its own document before its anchor, and the rows of its own block.

    Args:
        documents: int64 `[context]`, the document of each packed token.
        anchors: int64 `[blocks]`, places of the anchors among the packed tokens.
        causal: whether a row sees only the rows of its block up to itself.
        window: tokens of context that a row sees, in a causal layer with the rows of its block up to itself; 0 for all.
    """
    places = torch.arange(len(documents), device=documents.device)
    before = (documents == documents[anchors][:, None]) & (places < anchors[:, None])
    rows = torch.arange(len(anchors) * block_size, device=documents.device)
    own = rows[:, None] // block_size == rows // block_size
    before = before.repeat_interleave(block_size, 0)
    if causal:
        own &= rows <= rows[:, None]
    if window:
        begins = anchors.repeat_interleave(block_size) - window
        before &= places >= (begins + rows % block_size + 1 if causal else begins)[:, None]
    return torch.cat([before, own], 1)
