"""Attention of whole padded sequences: what training puts in the place of the paged cache."""

from torch import Tensor
from torch.nn import functional as F


class CausalAttention:
    """`[batch * length]` packed rows, each sequence causal in itself; padding belongs at the ends.

    Attributes:
        batch: sequences.
        length: rows of each.
    """

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length

    def __call__(self, query: Tensor, key_value: Tensor) -> Tensor:
        parts = (query, *key_value.chunk(2, 1))
        q, k, v = (t.reshape(self.batch, self.length, *t.shape[1:]).transpose(1, 2) for t in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(query.shape)
