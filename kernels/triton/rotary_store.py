# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Norms and rotary embedding of queries and keys, and the write of keys and values to the cache, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton.kv_codes import CODES, encode
from specdec.kernels.types.kv_entries import LARGEST, LEAST_SCALE, scales_of, stores_scales
from specdec.kernels.types.types import DTYPES, HeadNorms

# Numbers of a program: 16 a thread.
BLOCK_SIZE = 2048


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
    """Rotate queries and keys (halves convention), write keys and values into the cache, return the queries.

    Args:
        qkv: `[rows, heads + 2 * kv_heads, head_dim]`, float32, bfloat16 or float16; each row in one piece. Not
            to be used afterwards: the plain-torch twin rotates in place.
        cos: `[rows, 1, head_dim]`, of the same dtype.
        sin: the same; its first half carries the minus sign of "rotate half".
        kv: `[slots, 2 * kv_heads, head_dim]` of one layer, keys first, contiguous; or codes as in `kv_entries`.
        slots: int64 `[rows]`, where each row's keys and values go; of rows with the same slot any may stay.
        num_heads: query heads.
        scales: float32 `[2 * kv_heads]`, of codes, from the checkpoint; None: see `kv_entries.quantize`.
        norms: of queries and keys before they are rotated, their weights in the dtype of `qkv`; None for none.

    Returns:
        `[rows, heads, head_dim]`, the rotated queries.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    rows, heads, dim = qkv.shape
    if kv.shape[1:] != (heads - num_heads, dim) or (heads - num_heads) % 2 or dim % 2:
        raise ValueError(f"cache {tuple(kv.shape)} does not fit qkv {tuple(qkv.shape)} with {num_heads} query heads")
    if cos.shape != (rows, 1, dim) or sin.shape != cos.shape or slots.shape != (rows,):
        raise ValueError(
            f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} and slots {tuple(slots.shape)} do not fit {rows} rows"
        )
    is_coded = kv.dtype in LARGEST
    plain = qkv.dtype if is_coded else kv.dtype
    if qkv.dtype not in DTYPES or {cos.dtype, sin.dtype, plain} != {qkv.dtype} or slots.dtype != torch.int64:
        raise ValueError(f"qkv is {qkv.dtype}, cos {cos.dtype}, sin {sin.dtype}, cache {kv.dtype}, slots {slots.dtype}")
    whole = (is_coded or kv.is_contiguous()) and kv.stride()[1:] == (dim, 1) and slots.is_contiguous()
    if qkv.stride()[1:] != (dim, 1) or cos.stride(2) != 1 or sin.stride(2) != 1 or not whole:
        strides = [part.stride() for part in (qkv, cos, sin, kv, slots)]
        raise ValueError(f"qkv, cos, sin, cache and slots have strides {strides}: their rows are not in one piece")
    given: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0) if norms is None else norms
    if norms is not None:
        weights = norms.query, norms.key
        if any(one.shape != (dim,) or one.dtype != qkv.dtype or not one.is_contiguous() for one in weights):
            found = [f"{tuple(one.shape)} of {one.dtype}" for one in weights]
            raise ValueError(f"norms {found} do not fit heads of {dim} numbers of {qkv.dtype}")
    query = torch.empty(rows, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    if rows:
        block_dim = triton.next_power_of_2(dim)
        block = max(1, min(triton.next_power_of_2(heads), BLOCK_SIZE // block_dim))
        codes = {"CODES": CODES[kv.dtype], "LARGEST": LARGEST[kv.dtype]} if is_coded else {"CODES": 0, "LARGEST": 0.0}
        stored = scales_of(kv) if stores_scales(kv.dtype, scales) else None
        rotary_store_kernel[(rows, triton.cdiv(heads, block))](
            qkv, cos, sin, kv.view(torch.uint8) if is_coded else kv, stored, scales, slots, query, *given,
            qkv.stride(0), cos.stride(0), sin.stride(0), kv.stride(0), HEADS=num_heads,
            KV_HEADS=(heads - num_heads) // 2, DIM=dim, BLOCK=block, BLOCK_DIM=block_dim, **codes, num_warps=4,
        )  # fmt: skip
    return query


@triton.jit(do_not_specialize_on_alignment=["p_slots"])
def rotary_store_kernel(
    p_qkv,  # [rows, HEADS + 2 * KV_HEADS, DIM]
    p_cos,  # [rows, 1, DIM]
    p_sin,  # [rows, 1, DIM]
    p_kv,  # [slots, 2 * KV_HEADS, DIM]; uint8 where there are codes
    p_scale,  # bfloat16 [slots, 2 * KV_HEADS], beside the codes; None where slots store none
    p_given,  # float32 [2 * KV_HEADS] of the checkpoint; None for 1, or to measure each head where slots store scales
    p_slots,  # [rows]
    p_query,  # [rows, HEADS, DIM]
    p_query_norm,  # [DIM], weight of queries; None without norms
    p_key_norm,  # [DIM], of keys
    eps,  # run-time: costs nothing
    qkv_stride,  # run-time: qkv may be columns of a wider tensor
    cos_stride,  # run-time: cosines and sines lie side by side in one table
    sin_stride,  # run-time, for the same reason
    kv_slot,  # run-time: from slot to slot; codes beside scales do not fill one
    HEADS: tl.constexpr,  # a model has one or two; settles which heads are rotated
    KV_HEADS: tl.constexpr,  # as above
    DIM: tl.constexpr,  # a model has one or two; where it is a power of two, no masks are left
    BLOCK: tl.constexpr,  # heads of a program, the shape of the registers
    BLOCK_DIM: tl.constexpr,  # as above
    CODES: tl.constexpr,  # the kind of codes, 0 for none; one in an engine
    LARGEST: tl.constexpr,  # the number of the largest code
    LEAST_SCALE: tl.constexpr = LEAST_SCALE,
):
    i_row = tl.program_id(0).to(tl.int64)
    # [BLOCK, 1]
    o_head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    # [1, BLOCK_DIM]
    o_dim = tl.arange(0, BLOCK_DIM)[None, :]
    m_dim = o_dim < DIM
    p_row = p_qkv + i_row * qkv_stride + o_head * DIM
    m_x = (o_head < HEADS + 2 * KV_HEADS) & m_dim
    m_turned = (o_head < HEADS + KV_HEADS) & m_dim
    o_other = tl.where(o_dim < DIM // 2, o_dim + DIM // 2, o_dim - DIM // 2)
    # [BLOCK, BLOCK_DIM]; the other half comes from the first-level cache.
    b_x = tl.load(p_row + o_dim, mask=m_x, other=0.0)
    b_other = tl.load(p_row + o_other, mask=m_turned, other=0.0).to(tl.float32)
    # What is rotated.
    b_own = b_x.to(tl.float32)
    if p_query_norm is not None:
        b_mean = tl.sum(b_own * b_own, 1)[:, None] * (1.0 / DIM)
        # [BLOCK, 1], one number a head.
        b_scale = tl.div_rn(1.0, tl.sqrt_rn(b_mean + eps))
        b_own = _normed(b_own, b_scale, p_query_norm, p_key_norm, o_dim, o_head < HEADS, m_dim, b_x.dtype)
        b_other = _normed(b_other, b_scale, p_query_norm, p_key_norm, o_other, o_head < HEADS, m_dim, b_x.dtype)
    # [1, BLOCK_DIM]
    b_cos = tl.load(p_cos + i_row * cos_stride + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_row * sin_stride + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    b_turned = (b_own * b_cos + b_other * b_sin).to(b_x.dtype)
    # Values pass as they are, whatever bits they have.
    b_x = tl.where(o_head < HEADS + KV_HEADS, b_turned, b_x)
    tl.store(p_query + i_row * (HEADS * DIM) + o_head * DIM + o_dim, b_x, mask=(o_head < HEADS) & m_dim)
    slot = tl.load(p_slots + i_row)
    p_entry = p_kv + slot * kv_slot + (o_head - HEADS) * DIM
    m_stored = m_x & (o_head >= HEADS)
    if CODES == 0:
        tl.store(p_entry + o_dim, b_x, mask=m_stored)
    else:
        b_x = b_x.to(tl.float32)
        m_head = (o_head >= HEADS) & (o_head < HEADS + 2 * KV_HEADS)
        # [BLOCK, 1]
        if p_scale is not None:
            # Zero is added, or NaN where a number is not finite: so is the scale then.
            b_scale = tl.max(tl.abs(b_x), 1)[:, None] / LARGEST + tl.sum(b_x * 0.0, 1)[:, None]
            b_scale = b_scale.to(tl.bfloat16)
            b_scale = tl.where(b_scale.to(tl.float32) < LEAST_SCALE, 0.0, b_scale)
            # Slots with scales have an even number of bytes, and scales two.
            tl.store(p_scale + slot * (kv_slot // 2) + (o_head - HEADS), b_scale, mask=m_head)
            b_scale = b_scale.to(tl.float32)
            m_some = b_scale > 0
            b_x = tl.where(m_some, b_x / tl.where(m_some, b_scale, 1.0), 0.0)
        elif p_given is not None:
            b_x = b_x / tl.load(p_given + o_head - HEADS, mask=m_head, other=1.0)
        b_x = tl.where(b_x == b_x, b_x, 0.0)
        tl.store(p_entry + o_dim, encode(b_x, CODES, LARGEST), mask=m_stored)


@triton.jit
def _normed(b_x, b_scale, p_query_norm, p_key_norm, o_dim, is_query, m_dim, DTYPE: tl.constexpr):
    """Return `b_x`, float32 `[BLOCK, BLOCK_DIM]`, scaled and weighted, rounded as a norm of its own stores it."""
    b_query = tl.load(p_query_norm + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    b_key = tl.load(p_key_norm + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    return (b_x * b_scale * tl.where(is_query, b_query, b_key)).to(DTYPE).to(tl.float32)
