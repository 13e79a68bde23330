"""What a step asks of a device, in plain torch: the CPU path, and the reference of the Triton kernels."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.ragged_rows import RaggedRows

# What `scaled_dot_product_attention` runs on a CPU; called by its own name, it also gives the log-sum-exp.
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# What the Triton kernels compute with; what is here takes float64 as well.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension (Zhang & Sennrich 2019).

    Computed as the layer norm of `[x, -x]`, which has mean 0 and the mean square of x as its variance: one
    fused operation, where torch's own RMS norm is nine on a CPU.

    In float64 the normalisation itself runs in float32, as in transformers, so that a float64 run can be
    compared with it digit for digit.
    """
    if x.dtype != torch.float64:
        size = x.shape[-1]
        normed = F.layer_norm(torch.cat([x, -x], -1), (2 * size,), None, None, eps)
        return normed[..., :size] * weight
    single = x.float()
    single = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)
    return weight * single.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The `rms_norm` of `residual + x`, and that sum."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), halves convention, in place.

    Args:
        x: `[rows, heads, head_dim]`.
        cos: `[rows, 1, head_dim]`.
        sin: the same; its first half carries the minus sign of "rotate half", so that the rotation needs no
            negated copy.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for `gate_up = [rows, 2 * intermediate]`."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up.split_with_sizes((size, size), -1)
    return F.silu(gate) * up


def rotary_store(qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slots: Tensor, num_heads: int) -> Tensor:
    """`rotate_` of queries and keys, then the write of keys and values to one layer's cache.

    Args:
        qkv: `[rows, heads + 2 * kv_heads, head_dim]`, rotated in place.
        cos, sin: see `rotate_`.
        kv: `[slots, 2 * kv_heads, head_dim]`, keys first.
        slots: int64 `[rows]`.
        num_heads: query heads.

    Returns:
        `[rows, heads, head_dim]`, the rotated queries, in the memory of `qkv`.
    """
    stored = kv.shape[1]
    rotate_(qkv.narrow(1, 0, num_heads + stored // 2), cos, sin)
    query, key_value = qkv.split_with_sizes((num_heads, stored), 1)
    kv.index_copy_(0, slots, key_value)
    return query


def move_kv(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots `source` to slots `target` (int64 `[moves]`) in all layers; the two may overlap.

    Args:
        kv: `[layers, slots, 2 * kv_heads, head_dim]`.
    """
    kv.index_copy_(1, target, kv.index_select(1, source))


def copy_blocks(kv: Tensor, source_blocks: Tensor, target_blocks: Tensor, block_size: int) -> None:
    """Copy blocks `source_blocks` to `target_blocks` (int64 `[copies]`) in all layers; the two may overlap.

    Args:
        kv: `[layers, blocks * block_size, 2 * kv_heads, head_dim]`.
    """
    move_kv(kv.view(kv.shape[0], -1, block_size, *kv.shape[2:]), source_blocks, target_blocks)


def tree_attention(query: Tensor, kv: Tensor, rows: RaggedRows, scale: float) -> Tensor:
    """Attention of ragged query rows over a paged cache, causal along chains and by ancestors in trees.

    Query heads of a group share one copy of their keys. Rows that see all keys, as in plain decoding, are not
    masked; others are masked in the last columns alone, and what lies before is merged in. Scores and sums
    are float32 (float64 for float64 input).

    Args:
        query: `[rows, heads, head_dim]`.
        kv: `[slots, 2 * kv_heads, head_dim]`, keys first, this step's own already stored.
        rows: what each query row sees.
        scale: factor of the scores.

    Returns:
        `[rows, heads, head_dim]` in the query's dtype.
    """
    _, heads, dim = query.shape
    kv_heads = kv.shape[1] // 2
    group = heads // kv_heads
    output = None
    for part in rows.row_groups:
        tiles, num_rows, num_keys = part.shape
        q = query if part.queries is None else query.index_select(0, part.queries)
        q = q.view(tiles, num_rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(tiles, kv_heads, group * num_rows, dim)
        k, v = part.gather(kv).view(tiles, num_keys, 2, kv_heads, dim).permute(2, 0, 3, 1, 4).unbind(0)
        masks = part.masks(group, query.dtype)
        before = num_keys - part.tail
        if before == 0 or masks.tail is None:
            mixed, _ = attend(q, k, v, masks.tail, scale)
        else:
            mixed = merge(
                attend(q, k.narrow(2, 0, before), v.narrow(2, 0, before), masks.prefix, scale),
                attend(q, k.narrow(2, before, part.tail), v.narrow(2, before, part.tail), masks.tail, scale),
            )
        mixed = mixed.view(tiles, kv_heads, group, num_rows, dim).permute(0, 3, 1, 2, 4)
        mixed = mixed.reshape(tiles * num_rows, heads, dim)
        if part.scatter is None:
            return mixed
        if output is None:
            output = torch.empty_like(query)
        padded, packed = part.scatter
        output.index_copy_(0, packed, mixed.index_select(0, padded))
    assert output is not None, "a step has at least one query row"
    return output


class Attended(NamedTuple):
    """Attention over some of the keys.

    Attributes:
        output: `[tiles, heads, rows, head_dim]`.
        log_sum_exp: `[tiles, heads, rows]` of the scores, float32 at least.
    """

    output: Tensor
    log_sum_exp: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Attended:
    """Attention of `q` `[tiles, heads, rows, head_dim]` to `k`, `v` `[tiles, heads, keys, head_dim]`.

    Args:
        mask: `[tiles, 1, rows, keys]`, added to the scores; every row must see a key.
    """
    if q.device.type == "cpu":
        return Attended(*_FUSED(q, k, v, attn_mask=mask, scale=scale))
    return attend_generic(q, k, v, mask, scale)


def attend_generic(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Attended:
    """`attend` on any device."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q.to(exact) @ k.to(exact).transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    return Attended((torch.softmax(scores, -1) @ v.to(exact)).to(q.dtype), torch.logsumexp(scores, -1))


def merge(a: Attended, b: Attended) -> Tensor:
    """Attention over the keys of both, from each one's own (Dao et al. 2022): `[tiles, heads, rows, head_dim]`."""
    share = torch.sigmoid(a.log_sum_exp - b.log_sum_exp).unsqueeze(-1)
    exact = share.dtype
    return torch.lerp(b.output.to(exact), a.output.to(exact), share).to(a.output.dtype)
