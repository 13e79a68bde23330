# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Block verification of the drafted chains of a batch, on the device."""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton.residual import (
    BLOCK_SIZE,
    COIN,
    RESIDUAL,
    best_key,
    check_walk,
    draft_probs_of,
    draw,
    rest,
    uniform,
    weights,
)
from specdec.kernels.triton.score_keys import INFINITY, scores_of
from specdec.kernels.triton.tree_walk import empty_walk
from specdec.kernels.types.types import DraftProbs, NoiseColumns, PackedTrees, Walk

# With fewer, each thread has more numbers than registers.
NUM_WARPS = 16


def block_walk(scores: Tensor, draft_probs: DraftProbs, trees: PackedTrees, noise: NoiseColumns) -> Walk:
    """Accept the longest prefix of each chain whose coin falls below its h, then emit a draw from the residual of p.

    The rule is `reference.block_walk.walk_block` (Sun et al. 2025, Algorithm 2), with the coins and the draw of
    `PhiloxChance`, to the bit. With `v = exp(score - largest)` and T its sum, p = v / T, and what a prefix of weight w
    leaves of p, max(w p - q, 0), is `max(v - (T / w) q, 0)` times w / T.

    Args:
        scores: `[rows + nodes, vocab]`, float32, bfloat16 or float16; processed, not normalised; per row its root's,
            then those of its chain, each in one piece.
        draft_probs: what each token was drawn from, by the root or token before it.
        trees: the chains, none longer than `max_depth`.
        noise: of each row, at the position of the token after the root; every row must have some.

    Returns:
        The walk; it ends with -1 at a root or token whose largest score is no finite number, or that has a NaN, and
        nothing behind such a token is looked at.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    check_walk(scores, draft_probs, trees, noise)
    rows, vocab, max_depth = trees.starts.numel() - 1, scores.shape[1], trees.max_depth
    walk = empty_walk(rows, max_depth, scores.device)
    if rows:
        block_walk_kernel[(rows,)](
            scores, *draft_probs, trees.tokens, trees.starts, *noise[:3], *walk, scores.stride(0),
            draft_probs.table.stride(0), max_depth, VOCAB=vocab, BLOCK=min(triton.next_power_of_2(vocab), BLOCK_SIZE),
            # A prefix more than tokens.
            BLOCK_DEPTH=triton.next_power_of_2(max_depth + 1), num_warps=NUM_WARPS,
        )  # fmt: skip
    return walk


@triton.jit(do_not_specialize=["max_depth"])
def block_walk_kernel(
    p_scores,  # [rows + nodes, VOCAB]
    p_draft,  # [distributions, VOCAB]
    p_draft_rows,  # [rows + nodes]
    p_tokens,  # [nodes]
    p_starts,  # [rows + 1]
    p_seeds,  # [rows]
    p_sample_indices,  # [rows]
    p_positions,  # [rows]
    p_paths,  # [rows, max_depth]
    p_lengths,  # [rows]
    p_next_tokens,  # [rows]
    scores_stride,  # run-time: scores may be columns of a wider tensor
    draft_stride,  # as above
    max_depth,  # run-time: the longest chain of the step
    VOCAB: tl.constexpr,  # a model has one
    BLOCK: tl.constexpr,  # the shape of the registers
    BLOCK_DEPTH: tl.constexpr,  # the shape of the registers of a chain
):
    i_row = tl.program_id(0).to(tl.int64)
    start = tl.load(p_starts + i_row)
    # Every row before this one has a root, which is no node.
    num_nodes = tl.load(p_starts + i_row + 1) - start - 1
    p_tokens += start - i_row
    seed = tl.load(p_seeds + i_row)
    sample_index = tl.load(p_sample_indices + i_row)
    position = tl.load(p_positions + i_row)
    # [BLOCK_DEPTH]: of each prefix its weight w, and of p after it the largest score and the sum T.
    o_depth = tl.arange(0, BLOCK_DEPTH)
    b_prefix = tl.full([BLOCK_DEPTH], 1, tl.float64)
    b_tops = tl.full([BLOCK_DEPTH], 0, tl.float32)
    b_totals = tl.full([BLOCK_DEPTH], 0, tl.float64)
    # Of the prefix that is looked at.
    kept = tl.full([], 0, tl.int64)
    weight = tl.full([], 1, tl.float64)
    top = tl.full([], 0, tl.float32)
    total = tl.full([], 0, tl.float64)
    is_valid = tl.full([], 1, tl.int32)
    more = tl.full([], 1, tl.int32)
    while more > 0:
        p_row = p_scores + (start + kept) * scores_stride
        top = scores_of(best_key(p_row, VOCAB, BLOCK))
        more = tl.full([], 0, tl.int32)
        if tl.abs(top) < INFINITY:
            total = tl.full([], 0, tl.float64)
            for begin in range(0, VOCAB, BLOCK):
                total += tl.sum(weights(p_row, top, begin, VOCAB, BLOCK), 0)
            b_tops = tl.where(o_depth == kept, top, b_tops)
            b_totals = tl.where(o_depth == kept, total, b_totals)
            if kept < num_nodes:
                token = tl.load(p_tokens + kept)
                p = tl.exp(tl.load(p_row + token).to(tl.float32) - top).to(tl.float64) / total
                q = tl.load(p_draft + tl.load(p_draft_rows + start + kept) * draft_stride + token).to(tl.float64)
                # What q cannot have drawn is never accepted, nor what follows it.
                weight = tl.where(q > 0, tl.minimum(weight * p / tl.where(q > 0, q, 1.0), 1.0), 0.0)
                kept += 1
                b_prefix = tl.where(o_depth == kept, weight, b_prefix)
                more = (weight > 0).to(tl.int32)
        else:
            is_valid = tl.full([], 0, tl.int32)
    h = weight
    left_over = total
    share = tl.full([], 0, tl.float64)
    accepted = tl.full([], 0, tl.int32)
    while (kept > 0) & (accepted == 0):
        # Cantor's pairing with rank 0, as in `PhiloxChance`.
        coin = uniform(seed, sample_index, position, COIN, (kept - 1) * kept // 2)
        if coin < h:
            accepted = tl.full([], 1, tl.int32)
        else:
            kept -= 1
            is_valid = tl.full([], 1, tl.int32)
            m_kept = o_depth == kept
            weight = tl.sum(tl.where(m_kept, b_prefix, 0.0), 0)
            top = tl.sum(tl.where(m_kept, b_tops, 0.0), 0)
            total = tl.sum(tl.where(m_kept, b_totals, 0.0), 0)
            p_row = p_scores + (start + kept) * scores_stride
            p_q = p_draft + tl.load(p_draft_rows + start + kept) * draft_stride
            # The first prefix of weight 0 is the last that was looked at, so this one's is more.
            share = total / weight
            left_over = tl.full([], 0, tl.float64)
            for begin in range(0, VOCAB, BLOCK):
                b_q = draft_probs_of(p_q, begin, VOCAB, BLOCK)
                left_over += tl.sum(rest(weights(p_row, top, begin, VOCAB, BLOCK), share, b_q), 0)
            mass = left_over / share
            # Where p = q and w = 1 all that follows is accepted at first asking, but for rounding; so is this.
            h = tl.where(mass + 1 - weight > 0, mass / tl.where(mass + 1 - weight > 0, mass + 1 - weight, 1.0), 1.0)
            if left_over <= 0:
                share, left_over = tl.full([], 0, tl.float64), total
    next_token = tl.full([], -1, tl.int64)
    if is_valid > 0:
        p_row = p_scores + (start + kept) * scores_stride
        p_q = p_draft + tl.load(p_draft_rows + start + kept) * draft_stride
        u = uniform(seed, sample_index, position + kept, RESIDUAL, 0)
        next_token = draw(p_row, p_q, top, share, None, None, u * left_over, True, VOCAB, BLOCK)
    tl.store(p_paths + i_row * max_depth + o_depth, tl.where(o_depth < kept, o_depth, -1), mask=o_depth < max_depth)
    tl.store(p_lengths + i_row, kept)
    tl.store(p_next_tokens + i_row, next_token)
