"""Rotary embedding and cache writes in plain torch: what a CPU runs, and the reference of the Triton kernel."""

from torch import Tensor

from specdec.kernels.reference.elementwise import norm_heads
from specdec.kernels.types import kv_entries
from specdec.kernels.types.types import HeadNorms


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021), halves convention, in place.

    Args:
        x: `[rows, heads, head_dim]`.
        cos: `[rows, 1, head_dim]`.
        sin: the same; its first half carries the minus sign of "rotate half", so that the rotation needs no
            negated copy.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, sin)


def rotary_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    slots: Tensor,
    num_heads: int,
    scales: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """See `specdec.kernels.triton.rotary_store`; rotates in place, and returns queries in the memory of `qkv`."""
    stored = kv.shape[1]
    if norms is not None:
        norm_heads(qkv, norms, num_heads)
    rotate_(qkv.narrow(1, 0, num_heads + stored // 2), cos, sin)
    query, key_value = qkv.split_with_sizes((num_heads, stored), 1)
    kv_entries.store(kv, slots, key_value, scales)
    return query
