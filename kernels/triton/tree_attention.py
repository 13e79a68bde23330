# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Attention of ragged query rows over a paged cache.

Flash attention (Dao et al. 2022) with the query heads of a group and several rows of a request in one tile, so that
they share one read of their keys. A tile that would take longer than the others is cut along the context; a second
pass joins the parts by their log-sum-exp.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton.ancestor_bits import num_bits, num_bits_64, shift
from specdec.kernels.triton.attention_plan import CONFIGS, STAGES, AttentionGeometry, Plan, chip_of, configs_of
from specdec.kernels.triton.kv_codes import CODE_UNITS, CODES, decode
from specdec.kernels.types.kv_entries import LARGEST, scales_of, stores_scales
from specdec.kernels.types.ragged_rows import WORD_BITS, RaggedRows
from specdec.kernels.types.types import DTYPES

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
MAX_WORDS = 2
# Query heads per KV head that every dtype and head_dim takes.
MAX_GROUP = min(max(heights) for heights in CONFIGS.values())
# Parts joined at a time, and warps that join them.
JOINED_PARTS, JOIN_WARPS = 16, 2


def tree_attention(
    query: Tensor,
    kv: Tensor,
    rows: RaggedRows,
    scale: float,
    window: int = 0,
    slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Compute attention of ragged query rows over a paged cache, causal along chains and by ancestors in trees.

    Scores and sums are float32; float32 input is multiplied as such, never as TF32. The first call of a step lays
    out its work and sends it to the device; the others, and it too once `rows.plans` has the layout, only launch
    kernels, so that they can be captured in a CUDA graph.

    Args:
        query: `[rows, heads, head_dim]`, float32, bfloat16 or float16, contiguous along the last dimension.
        kv: `[slots, 2 * kv_heads, head_dim]`, laid out alike, of the same dtype, or codes as in `kv_entries`; keys
            first, this step's own already stored.
        rows: what each query row sees; trees of at most 128 nodes.
        scale: factor of the scores.
        window: tokens that a row sees, itself included; 0 for all. No tree is deeper.
        slopes: `[heads]`, float32 or float64, for ALiBi (Press et al. 2108.12409): a head's slope times the distance
            to a key, in positions, is taken from the score. Rows of a block (`sees_later`) have none.
        kv_scales: float32 `[2 * kv_heads]`, of codes, from the checkpoint; None: see `kv_entries.quantize`.

    Returns:
        `[rows, heads, head_dim]` in the query's dtype, contiguous.

    Raises:
        ValueError: a dtype, head_dim or number of heads or nodes that the kernel was not made for.
    """
    num_rows, heads, dim = query.shape
    kv_heads = kv.shape[1] // 2
    _check(query, kv, rows, slopes)
    group, padded = heads // kv_heads, triton.next_power_of_2(dim)
    geometry = AttentionGeometry(query.element_size(), padded, group, kv_heads, window)
    plan = plan_of(rows, geometry)

    output = torch.empty((num_rows, heads, dim), dtype=query.dtype, device=query.device)
    parts = torch.empty((plan.num_parts, kv_heads, plan.height, dim), dtype=torch.float32, device=query.device)
    log_sums = torch.empty(parts.shape[:3], dtype=torch.float32, device=query.device)
    shape = {"GROUP": group, "HEAD_DIM": dim, "BLOCK_M": plan.height, "BLOCK_D": padded, "enable_fp_fusion": True}
    inputs = (plan.items, rows.block_tables, rows.visible, rows.ancestors)
    strides = (*query.stride()[:2], *kv.stride()[:2], rows.block_tables.stride(0))
    entries = kv.view(torch.uint8) if kv.dtype in LARGEST else kv
    stored = scales_of(kv) if stores_scales(kv.dtype, kv_scales) else None
    config = plan.config
    if window or slopes is not None or kv.dtype in LARGEST:
        config = configs_of(geometry, chip_of(query.device), crowded=True)[plan.height]
    tree_attention_kernel[(len(plan.items) * kv_heads,)](
        query, entries, stored, kv_scales, output, parts, log_sums, *inputs, slopes, scale * math.log2(math.e), window,
        kv_heads, *strides, CODES=CODES.get(kv.dtype, 0), UNIT=CODE_UNITS.get(kv.dtype, 1.0), WINDOWED=window > 0,
        SLOPED=slopes is not None,
        WORDS=rows.ancestors.shape[1], BLOCK_SIZE=rows.block_size, BLOCK_N=config.keys,
        **shape, num_warps=config.warps, num_stages=STAGES,
    )  # fmt: skip
    if plan.num_parts:
        grid = (len(plan.joins), plan.height // group, heads)
        join_parts_kernel[grid](
            output, parts, log_sums, plan.joins, kv_heads, BLOCK_P=JOINED_PARTS, **shape, num_warps=JOIN_WARPS
        )
    return output


def plan_of(rows: RaggedRows, heads: AttentionGeometry) -> Plan:
    """Return the work plan of these rows, made at the first call.

    Raises:
        ValueError: more query heads per KV head than the kernel was made for.
    """
    plan: Plan | None = rows.plans.get(heads)
    if plan is None:
        chip = chip_of(rows.visible.device)
        plan = rows.plans[heads] = Plan.make(rows, heads, configs_of(heads, chip), chip.processors)
    return plan


def _check(query: Tensor, kv: Tensor, rows: RaggedRows, slopes: Tensor | None) -> None:
    assert query.shape[0], "a step has at least one query row"
    assert rows.visible.is_contiguous()
    assert rows.ancestors.is_contiguous()
    assert slopes is None or not rows.sees_later
    if query.dtype not in DTYPES or (kv.dtype != query.dtype and kv.dtype not in LARGEST):
        raise ValueError(f"query is {query.dtype}, cache {kv.dtype}; both must be one of {DTYPES}")
    if query.shape[2] not in HEAD_DIMS or kv.shape[2] != query.shape[2]:
        raise ValueError(f"head_dim is {query.shape[2]}, in the cache {kv.shape[2]}; both must be one of {HEAD_DIMS}")
    if query.stride(2) != 1 or kv.stride(2) != 1:
        raise ValueError(f"strides of query {query.stride()} and cache {kv.stride()} must end in 1")
    if query.shape[1] % (kv.shape[1] // 2):
        raise ValueError(f"{query.shape[1]} query heads are no multiple of {kv.shape[1] // 2} KV heads")
    words = rows.ancestors.shape[1]
    if words > MAX_WORDS:
        raise ValueError(
            f"ancestors of {words} words; at most {MAX_WORDS}, {MAX_WORDS * WORD_BITS} nodes, are supported"
        )


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    """Return loaded numbers; masked ones are 0 and not read."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    return tl.load(pointers)


@triton.jit
def _attend(
    b_acc,  # float32 [BLOCK_M, BLOCK_D], weighted sum of values so far
    b_top,  # float32 [BLOCK_M], highest score so far
    b_sum,  # float32 [BLOCK_M], sum of weights so far
    b_q,  # [BLOCK_M, BLOCK_D]
    p_k,  # [slots, HEAD_DIM], of one KV head
    p_v,
    p_k_scale,  # bfloat16 [slots], of one KV head; not looked at where slots store none
    p_v_scale,
    p_table,  # int64 [blocks], of one request
    begin,
    end,
    tree_start,
    b_first,  # [BLOCK_M], first entry that a row sees; not looked at without a window
    b_visible,  # [BLOCK_M]
    b_low,  # uint64 [BLOCK_M], bits of nodes 0 to 63
    b_high,  # uint64 [BLOCK_M], bits of nodes 64 to 127; not looked at where there is one word
    b_slope,  # float32 [BLOCK_M], times log2(e); and
    b_depth,  # int32 [BLOCK_M], a row's number of bits; not looked at without slopes
    scale,
    kv_slot,
    MASKED: tl.constexpr,  # whether some row does not see some entry
    WINDOWED: tl.constexpr,
    SLOPED: tl.constexpr,
    WORDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CODES: tl.constexpr,
    SCALED: tl.constexpr,  # whether slots store scales
):
    """Continue over entries `[begin, end)`; unmasked, they are a multiple of BLOCK_N."""
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    for at in range(begin, end, BLOCK_N):
        entry = at + o_n
        m_n = entry < end
        # [BLOCK_N], int64
        block = _load(p_table + entry // BLOCK_SIZE, m_n, MASKED).to(tl.int64)
        slot = block * BLOCK_SIZE + entry % BLOCK_SIZE
        # [BLOCK_N, BLOCK_D]
        o_kv = slot[:, None] * kv_slot + o_d[None, :]
        m_kv = m_n[:, None] & (o_d < HEAD_DIM)[None, :]
        b_k = _load(p_k + o_kv, m_kv, MASKED or BLOCK_D != HEAD_DIM)
        if CODES != 0:
            b_k = decode(b_k, CODES, b_q.dtype)
        # [BLOCK_M, BLOCK_N]
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if SCALED:
            # Slots with scales have an even number of bytes, and scales two.
            o_scale = slot * (kv_slot // 2)
            b_score *= _load(p_k_scale + o_scale, m_n, MASKED).to(tl.float32)[None, :]
        if SLOPED:
            # How far a cached entry is before the row; it is negative.
            b_distance = entry[None, :] - (b_visible + b_depth - 1)[:, None]
        if MASKED:
            # [BLOCK_M]: bit n stands for the node in entry `at + n`.
            b_bits = shift(b_low, at - tree_start)
            if WORDS == 2:
                b_bits |= shift(b_high, at - tree_start - 64)
            # Tested by halves, as a GPU's words have 32 bits.
            b_half = b_bits.to(tl.uint32)[:, None]
            if BLOCK_N > 32:
                b_half = tl.where((o_n < 32)[None, :], b_half, (b_bits >> 32).to(tl.uint32)[:, None])
            m_node = (b_half >> (o_n % 32).to(tl.uint32)[None, :]) & 1 != 0
            m_seen = entry[None, :] < b_visible[:, None]
            if SLOPED:
                # A node's distance is the number of the row's bits behind the node's: those from `at` on, less those up
                # to the node.
                b_from = num_bits_64(shift(b_low, tl.maximum(at - tree_start, 0)))
                if WORDS == 2:
                    b_from += num_bits_64(shift(b_high, tl.maximum(at - tree_start - 64, 0)))
                b_up_to = num_bits(b_half & (0xFFFFFFFF >> (31 - o_n % 32).to(tl.uint32))[None, :])
                if BLOCK_N > 32:
                    b_up_to += tl.where((o_n < 32)[None, :], 0, num_bits(b_bits.to(tl.uint32))[:, None])
                b_distance = tl.where(m_seen, b_distance, b_up_to - b_from[:, None])
            if WINDOWED:
                m_seen = m_seen & (entry[None, :] >= b_first[:, None])
            if SLOPED:
                b_score += b_slope[:, None] * b_distance.to(tl.float32)
            # Neither holds from the end on: that is a whole block's, or the last entry's that a row sees.
            b_score = tl.where(m_seen | m_node, b_score, float("-inf"))
        elif SLOPED:
            b_score += b_slope[:, None] * b_distance.to(tl.float32)
        b_new_top = tl.maximum(b_top, tl.max(b_score, 1))
        # A row that has seen no key so far: weights are exp2(-inf - 0), not exp2(-inf + inf).
        b_base = tl.where(b_new_top == float("-inf"), 0.0, b_new_top) if MASKED else b_new_top
        b_weight = tl.exp2(b_score - b_base[:, None])
        b_shrink = tl.exp2(b_top - b_base)
        b_v = _load(p_v + o_kv, m_kv, MASKED or BLOCK_D != HEAD_DIM)
        if SCALED:
            b_scale = _load(p_v_scale + o_scale, m_n, MASKED).to(tl.float32)
            b_v = (decode(b_v, CODES, tl.float32) * b_scale[:, None]).to(b_q.dtype)
        elif CODES != 0:
            b_v = decode(b_v, CODES, b_q.dtype)
        b_acc = tl.dot(b_weight.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
        b_sum = b_sum * b_shrink + tl.sum(b_weight, 1)
        b_top = b_new_top
    return b_acc, b_top, b_sum


@triton.jit(do_not_specialize=["table_row"])
def tree_attention_kernel(
    p_query,  # [rows, heads, HEAD_DIM], any strides but 1 along HEAD_DIM
    p_kv,  # [slots, 2 * kv_heads, HEAD_DIM]; uint8 where there are codes
    p_scale,  # bfloat16 [slots, 2 * kv_heads], beside the codes; None where slots store none
    p_given,  # float32 [2 * kv_heads] of the checkpoint; None where it has none
    p_output,  # [rows, heads, HEAD_DIM], contiguous
    p_part,  # float32 [parts, kv_heads, BLOCK_M, HEAD_DIM]
    p_log_sum,  # float32 [parts, kv_heads, BLOCK_M], base 2
    p_item,  # int32 [items, 8], see Plan
    p_tables,  # int64 [requests, blocks]
    p_visible,  # int64 [rows]
    p_ancestors,  # int64 [rows, WORDS]
    p_slope,  # float32 or float64 [heads]; None where there are none
    scale,  # run-time: costs nothing; times log2(e), for exp2
    window,  # run-time: a bound of the loops
    kv_heads,  # run-time: needed outside the loop only
    q_row,  # run-time strides, in elements; a query may be columns of a fused QKV
    q_head,
    kv_slot,  # run-time strides; Triton sees for itself that they are multiples of 16, which makes loads wide
    kv_head,
    table_row,  # run-time, and its factors not compiled in: it grows with the context, and no step waits for a compiler
    CODES: tl.constexpr,  # constexpr: the kind of codes, 0 for none; one in an engine
    UNIT: tl.constexpr,  # constexpr: what codes as they are decoded are in units of
    WINDOWED: tl.constexpr,  # constexpr: layers without a window do without its mask
    SLOPED: tl.constexpr,  # constexpr: layers without slopes compute no distances
    WORDS: tl.constexpr,  # constexpr: trees of 64 nodes, the usual ones, do without the second word
    GROUP: tl.constexpr,  # constexpr: fixed in a model, and a divisor
    HEAD_DIM: tl.constexpr,  # constexpr: fixed in a model; where it is a power of two, no mask is needed
    BLOCK_SIZE: tl.constexpr,  # constexpr: fixed in an engine, and a divisor, mostly a power of two
    BLOCK_M: tl.constexpr,  # constexpr: the shape of the registers; rows times GROUP, padded
    BLOCK_N: tl.constexpr,  # constexpr: the shape of the registers, keys at a time
    BLOCK_D: tl.constexpr,  # constexpr: the shape of the registers, HEAD_DIM padded to a power of two
):
    """Run one item for one KV head: consecutive rows of a request over a range of its entries."""
    i_item, i_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    p_item += i_item * 8
    request, first_row, num_rows = tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2)
    begin, end = tl.load(p_item + 3), tl.load(p_item + 4)
    tree_start, i_part = tl.load(p_item + 5), tl.load(p_item + 6)

    o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    m_m = o_m // GROUP < num_rows
    m_md = m_m[:, None] & (o_d < HEAD_DIM)[None, :]
    row = (first_row + o_m // GROUP).to(tl.int64)
    head = i_head * GROUP + o_m % GROUP
    # [BLOCK_M, BLOCK_D]
    b_q = tl.load(p_query + (row * q_row + head * q_head)[:, None] + o_d[None, :], mask=m_md, other=0.0)
    # [BLOCK_M]; padding sees all, so that it holds back no row.
    b_visible = tl.load(p_visible + row, mask=m_m, other=end).to(tl.int32)
    b_low = tl.load(p_ancestors + row * WORDS, mask=m_m, other=0).to(tl.uint64, bitcast=True)
    b_high = b_low
    if WORDS == 2:
        b_high = tl.load(p_ancestors + row * WORDS + 1, mask=m_m, other=0).to(tl.uint64, bitcast=True)

    p_table = p_tables + request.to(tl.int64) * table_row
    p_k = p_kv + i_head.to(tl.int64) * kv_head
    # Cast by a function: of one KV head Triton makes a constant, which has no methods.
    p_v = p_k + tl.cast(kv_heads, tl.int64) * kv_head
    p_k_scale, p_v_scale = p_k, p_v
    if p_scale is not None:
        p_k_scale = p_scale + i_head
        p_v_scale = p_k_scale + kv_heads
    # Scales that all slots share are factors of the scores and of the output.
    scale *= UNIT
    value_scale = UNIT
    if p_given is not None:
        scale *= tl.load(p_given + i_head)
        value_scale *= tl.load(p_given + kv_heads + i_head)
    b_slope, b_depth = b_visible, b_visible
    if WINDOWED or SLOPED:
        b_depth = num_bits_64(b_low)
        if WORDS == 2:
            b_depth += num_bits_64(b_high)
    if SLOPED:
        # log2(e), as the scale has it.
        b_slope = tl.load(p_slope + head).to(tl.float32) * 1.4426950408889634
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    # Up to here every row sees every entry, but for those before its window.
    seen_by_all = tl.minimum(tl.min(b_visible, 0), end)
    middle = begin + tl.maximum(seen_by_all - begin, 0) // BLOCK_N * BLOCK_N
    if WINDOWED:
        b_first = tl.where(m_m, b_visible + b_depth - window, begin)
        # From here on no row begins.
        begun = begin + tl.cdiv(tl.maximum(tl.max(b_first, 0) - begin, 0), BLOCK_N) * BLOCK_N
        begun = tl.minimum(begun, end)
        middle = tl.maximum(middle, begun)
        b_acc, b_top, b_sum = _attend(
            b_acc, b_top, b_sum, b_q, p_k, p_v, p_k_scale, p_v_scale, p_table, begin, begun, tree_start, b_first,
            b_visible, b_low, b_high, b_slope, b_depth, scale, kv_slot, True, WINDOWED, SLOPED, WORDS, HEAD_DIM,
            BLOCK_SIZE, BLOCK_N, BLOCK_D, CODES, p_scale is not None,
        )  # fmt: skip
        begin = begun
    b_acc, b_top, b_sum = _attend(
        b_acc, b_top, b_sum, b_q, p_k, p_v, p_k_scale, p_v_scale, p_table, begin, middle, tree_start, b_visible,
        b_visible, b_low, b_high, b_slope, b_depth, scale, kv_slot, False, False, SLOPED, WORDS, HEAD_DIM,
        BLOCK_SIZE, BLOCK_N, BLOCK_D, CODES, p_scale is not None,
    )  # fmt: skip
    b_acc, b_top, b_sum = _attend(
        b_acc, b_top, b_sum, b_q, p_k, p_v, p_k_scale, p_v_scale, p_table, middle, end, tree_start, b_visible,
        b_visible, b_low, b_high, b_slope, b_depth, scale, kv_slot, True, False, SLOPED, WORDS, HEAD_DIM,
        BLOCK_SIZE, BLOCK_N, BLOCK_D, CODES, p_scale is not None,
    )  # fmt: skip

    # A row may see nothing of a part: output 0, log-sum-exp -inf.
    b_output = b_acc / tl.where(b_sum == 0, 1.0, b_sum)[:, None] * value_scale
    if i_part < 0:
        o_output = (row * kv_heads * GROUP + head) * HEAD_DIM
        tl.store(p_output + o_output[:, None] + o_d[None, :], b_output, mask=m_md)
    else:
        o_part = (i_part.to(tl.int64) * kv_heads + i_head) * BLOCK_M + o_m
        tl.store(p_part + o_part[:, None] * HEAD_DIM + o_d[None, :], b_output, mask=m_md)
        tl.store(p_log_sum + o_part, b_top + tl.log2(b_sum), mask=m_m)


@triton.jit
def join_parts_kernel(
    p_output,  # [rows, heads, HEAD_DIM], contiguous
    p_part,  # float32 [parts, kv_heads, BLOCK_M, HEAD_DIM]
    p_log_sum,  # float32 [parts, kv_heads, BLOCK_M], base 2
    p_join,  # int32 [tiles, 4], see Plan
    kv_heads,  # run-time, and all others constexpr, as above
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,  # parts at a time; how many there are is run-time, as it depends on the context
):
    """Join one query head of one row: the mean of its parts, weighted by exp2(log_sum)."""
    p_join += tl.program_id(0) * 4
    i_row, i_head = tl.program_id(1), tl.program_id(2)
    first_row, num_rows = tl.load(p_join), tl.load(p_join + 1)
    first_part, num_parts = tl.load(p_join + 2), tl.load(p_join + 3)
    if i_row < num_rows:
        o_p, o_d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
        b_acc = tl.zeros([BLOCK_D], tl.float32)
        top, total = -float("inf"), 0.0
        for at in range(0, num_parts, BLOCK_P):
            m_p = at + o_p < num_parts
            o_part = (first_part + at + o_p).to(tl.int64) * kv_heads + i_head // GROUP
            o_part = o_part * BLOCK_M + i_row * GROUP + i_head % GROUP
            # [BLOCK_P]
            b_log_sum = tl.load(p_log_sum + o_part, mask=m_p, other=float("-inf"))
            # [BLOCK_P, BLOCK_D]
            p_values = p_part + o_part[:, None] * HEAD_DIM + o_d[None, :]
            b_values = tl.load(p_values, mask=m_p[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
            new_top = tl.maximum(top, tl.max(b_log_sum, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            b_weight = tl.exp2(b_log_sum - base)
            shrink = tl.exp2(top - base)
            b_acc = b_acc * shrink + tl.sum(b_weight[:, None] * b_values, 0)
            total = total * shrink + tl.sum(b_weight, 0)
            top = new_top
        o_output = ((first_row + i_row).to(tl.int64) * kv_heads * GROUP + i_head) * HEAD_DIM
        tl.store(p_output + o_output + o_d, b_acc / total, mask=o_d < HEAD_DIM)
