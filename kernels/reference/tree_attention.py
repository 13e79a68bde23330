"""Attention over a paged cache in plain torch: what a CPU runs, and the reference of the Triton kernel."""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.types import kv_entries
from specdec.kernels.types.ragged_rows import RaggedRows, RowGroup

# What `scaled_dot_product_attention` runs on a CPU; called by its own name, it also gives the log-sum-exp.
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def tree_attention(
    query: Tensor,
    kv: Tensor,
    rows: RaggedRows,
    scale: float,
    window: int = 0,
    slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """See `specdec.kernels.triton.tree_attention`; takes any head_dim and tree, and float64, which it also computes in.

    Query heads of a group share one copy of their keys. Rows that see all keys, as in plain decoding, are not
    masked; others are masked in the last columns alone, and what lies before is merged in.
    """
    _, heads, dim = query.shape
    kv_heads = kv.shape[1] // 2
    group = heads // kv_heads
    output = None
    # Entries in 8 bits are widened to float32, whose products are summed in it.
    given = query.dtype
    if kv.dtype in kv_entries.LARGEST:
        query = query.to(torch.promote_types(given, torch.float32))
    for part in rows.row_groups(window):
        tiles, num_rows, num_keys = part.shape
        q = query if part.queries is None else query.index_select(0, part.queries)
        q = q.view(tiles, num_rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(tiles, kv_heads, group * num_rows, dim)
        entries = _entries(part, kv, query.dtype, kv_scales)
        k, v = entries.view(tiles, num_keys, 2, kv_heads, dim).permute(2, 0, 3, 1, 4).unbind(0)
        masks = part.masks(group, query.dtype)
        if slopes is not None:
            # Positions are large numbers: float32 at least.
            masks = part.biased_masks(group, torch.promote_types(query.dtype, torch.float32), slopes)
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
            return mixed.to(given)
        if output is None:
            output = torch.empty_like(query)
        padded, packed = part.scatter
        output.index_copy_(0, packed, mixed.index_select(0, padded))
    assert output is not None, "a step has at least one query row"
    return output.to(given)


def _entries(part: RowGroup, kv: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """Return the keys and values of a group, `[tiles * keys, 2 * kv_heads, head_dim]`."""
    if kv.dtype not in kv_entries.LARGEST:
        return part.gather(kv)
    return kv_entries.read(part.gather(kv_entries.slots_of(kv)), kv, dtype, scales)


class Attended(NamedTuple):
    """Attention output over some of the keys.

    Attributes:
        output: `[tiles, heads, rows, head_dim]`.
        log_sum_exp: `[tiles, heads, rows]` of the scores, float32 at least.
    """

    output: Tensor
    log_sum_exp: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Attended:
    """Attend from `q` `[tiles, heads, rows, head_dim]` to `k`, `v` `[tiles, heads, keys, head_dim]`.

    Args:
        mask: `[tiles, 1 or heads, rows, keys]`, added to the scores; every row must see a key.
    """
    if q.device.type == "cpu":
        return Attended(*_FUSED(q, k, v, attn_mask=mask, scale=scale))
    return attend_generic(q, k, v, mask, scale)


def attend_generic(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Attended:
    """Compute `attend` on any device."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q.to(exact) @ k.to(exact).transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    return Attended((torch.softmax(scores, -1) @ v.to(exact)).to(q.dtype), torch.logsumexp(scores, -1))


def merge(a: Attended, b: Attended) -> Tensor:
    """Return attention over the keys of both (Dao et al. 2022), `[tiles, heads, rows, head_dim]`."""
    share = torch.sigmoid(a.log_sum_exp - b.log_sum_exp).unsqueeze(-1)
    exact = share.dtype
    return torch.lerp(b.output.to(exact), a.output.to(exact), share).to(a.output.dtype)
