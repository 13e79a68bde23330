"""What a step asks of a device, in plain torch: the CPU path, and the reference of the Triton kernels."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.ragged_rows import RaggedRows


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


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), halves convention.

    Args:
        x: `[rows, heads, head_dim]`.
        cos_sin: `[rows, 2, 1, head_dim]`; the sine's first half carries the minus sign of "rotate half",
            so that the rotation needs no negated copy.
    """
    cos, sin = cos_sin.unbind(1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for `gate_up = [rows, 2 * intermediate]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def store_kv(kv: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write `key` and `value` (`[rows, kv_heads, head_dim]`) into `slots` (`[rows]`) of one layer's cache.

    Args:
        kv: `[num_blocks, block_size, 2, kv_heads, head_dim]`, keys at 0 and values at 1 of the third dimension.
    """
    kv.flatten(0, 1).index_copy_(0, slots, torch.stack((key, value), 1))


def move_kv(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots `source` to slots `target` (int64 `[moves]`) in all layers; the two may overlap.

    Args:
        kv: `[layers, num_blocks, block_size, 2, kv_heads, head_dim]`.
    """
    flat = kv.flatten(1, 2)
    flat.index_copy_(1, target, flat.index_select(1, source))


def tree_attention(query: Tensor, kv: Tensor, rows: RaggedRows, scale: float) -> Tensor:
    """Attention of ragged query rows over a paged cache, causal along chains and by ancestors in trees.

    Query heads of a group share one copy of their keys, and only the columns that some row does not see are
    masked. Where there are such columns, scores and sums are float32 (float64 for float64 input); elsewhere
    they are those of torch's fused attention, so below float32 the two can differ in the last bit.

    Args:
        query: `[rows, heads, head_dim]`.
        kv: `[num_blocks, block_size, 2, kv_heads, head_dim]`, this step's keys and values already stored.
        rows: what each query row sees.
        scale: factor of the scores.

    Returns:
        `[rows, heads, head_dim]` in the query's dtype.
    """
    _, heads, dim = query.shape
    kv_heads = kv.shape[3]
    group = heads // kv_heads
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    dense = torch.contiguous_format
    flat = kv.flatten(0, 1)
    output = None
    for part in rows.row_groups:
        tiles, num_rows, num_keys = part.shape
        q = query if part.queries is None else query.index_select(0, part.queries)
        q = q.view(tiles, num_rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        entries = part.gather(flat)
        if part.hidden is None and part.padding is None:
            # Every row sees every key, as in plain decoding: torch's fused attention needs no mask then.
            k, v = entries.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q.reshape(tiles, kv_heads, group * num_rows, dim), k, v, scale=scale)
        else:
            q = q.to(exact, memory_format=dense).reshape(tiles * kv_heads, group * num_rows, dim)
            # Converted before it is permuted: a straight copy is several times as fast as a strided one.
            entries = entries.to(exact).permute(2, 0, 3, 1, 4)
            k, v = entries.reshape(2, tiles * kv_heads, num_keys, dim).unbind(0)
            scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=scale)
            by_row = scores.view(tiles, kv_heads, group, num_rows, num_keys)
            if part.hidden is not None:
                by_row[..., num_keys - part.width :].masked_fill_(part.hidden, float("-inf"))
            if part.padding is not None:
                by_row.masked_fill_(part.padding, float("-inf"))
            mixed = torch.bmm(torch.softmax(scores, -1), v)
        mixed = mixed.view(tiles, kv_heads, group, num_rows, dim).permute(0, 3, 1, 2, 4)
        mixed = mixed.to(query.dtype, memory_format=dense).reshape(tiles * num_rows, heads, dim)
        if part.scatter is None:
            return mixed
        if output is None:
            output = torch.empty_like(query)
        padded, packed = part.scatter
        output.index_copy_(0, packed, mixed.index_select(0, padded))
    assert output is not None, "a step has at least one query row"
    return output
