"""Attention of whole padded sequences: what training puts in the place of the paged cache."""

from torch import Tensor
from torch.nn import functional as F

from specdec.draft_heads.rope import Rotary
from specdec.kernels.reference import rotate_


class CausalAttention:
    """`[batch * length]` packed rows, each sequence causal in itself; padding belongs at the ends.

    Attributes:
        batch: sequences.
        length: rows of each.
    """

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length

    def __call__(self, qkv: Tensor, rotary: Rotary, num_heads: int) -> Tensor:
        kv_heads = (qkv.shape[1] - num_heads) // 2
        rotate_(qkv.narrow(1, 0, num_heads + kv_heads), *rotary)
        parts = qkv.split_with_sizes((num_heads, kv_heads, kv_heads), 1)
        q, k, v = (t.reshape(self.batch, self.length, *t.shape[1:]).transpose(1, 2) for t in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(parts[0].shape)
