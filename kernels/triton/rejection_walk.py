# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Rejection sampling down the draft trees of a batch, on the device."""

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
    without,
)
from specdec.kernels.triton.score_keys import INFINITY, scores_of, tokens_of
from specdec.kernels.triton.tree_walk import block_sizes, empty_walk
from specdec.kernels.types.types import DraftProbs, NoiseColumns, PackedTrees, Walk

# For whole blocks of scores. As many for smaller ones would each be left too few registers.
NUM_WARPS = 8


def rejection_walk(scores: Tensor, draft_probs: DraftProbs | None, trees: PackedTrees, noise: NoiseColumns) -> Walk:
    """Walk down from each root while a child is accepted, then emit a draw from the residual of p.

    The rule is `verify.rejection.walk_rejection`: p = softmax(scores) of the node; a child x is accepted with
    probability min(1, p[x] / q[x]), else p becomes norm(max(p - q, 0)) and q loses x; without draft probabilities each
    child is its own q. The coins and the draw are those of `PhiloxChance`, to the bit.

    Args:
        scores: `[rows + nodes, vocab]`, float32, bfloat16 or float16; processed, not normalised; per row its root's,
            then its nodes', each in one piece.
        draft_probs: what children were drawn from, in their order and without replacement; None where they were
            chosen without chance.
        trees: the trees.
        noise: of each row, at the position of the token after the root; a row without follows the argmax of its
            scores, lowest id on ties.

    Returns:
        The walk; it ends with -1 at a root or node whose largest score is no finite number, or that has a NaN.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    check_walk(scores, draft_probs, trees, noise)
    *parts, max_nodes, max_depth = trees
    rows, vocab = trees.starts.numel() - 1, scores.shape[1]
    walk = empty_walk(rows, max_depth, scores.device)
    if rows:
        block, (nodes, depth) = min(triton.next_power_of_2(vocab), BLOCK_SIZE), block_sizes(max_nodes, max_depth)
        rejection_walk_kernel[(rows,)](
            scores, *(draft_probs or (None, None)), *parts, *noise, *walk, scores.stride(0), 0 if draft_probs is None
            else draft_probs.table.stride(0), max_depth, HAS_DRAFT=draft_probs is not None,
            VOCAB=vocab, BLOCK=block, NODES=nodes, BLOCK_DEPTH=depth, num_warps=max(1, min(NUM_WARPS, block // 128)),
        )  # fmt: skip
    return walk


@triton.jit(do_not_specialize=["max_depth"])
def rejection_walk_kernel(
    p_scores,  # [rows + nodes, VOCAB]
    p_draft,  # [draft rows, VOCAB], or None
    p_draft_rows,  # [rows + nodes], or None
    p_tokens,  # [nodes]
    p_parents,  # [nodes]
    p_starts,  # [rows + 1]
    p_seeds,  # [rows]
    p_sample_indices,  # [rows]
    p_positions,  # [rows]
    p_sampled,  # [rows]
    p_paths,  # [rows, max_depth]
    p_lengths,  # [rows]
    p_next_tokens,  # [rows]
    scores_stride,  # run-time: scores may be columns of a wider tensor
    draft_stride,  # as above
    max_depth,  # run-time: the deepest tree of the step
    HAS_DRAFT: tl.constexpr,  # two rules
    VOCAB: tl.constexpr,  # a model has one
    BLOCK: tl.constexpr,  # the shape of the registers
    NODES: tl.constexpr,  # as above
    BLOCK_DEPTH: tl.constexpr,  # the shape of the registers of a path
):
    i_row = tl.program_id(0).to(tl.int64)
    start = tl.load(p_starts + i_row)
    # Every row before this one has a root, which is no node.
    num_nodes = tl.load(p_starts + i_row + 1) - start - 1
    p_tokens += start - i_row
    p_parents += start - i_row
    sampled = tl.load(p_sampled + i_row)
    seed = tl.load(p_seeds + i_row)
    sample_index = tl.load(p_sample_indices + i_row)
    position = tl.load(p_positions + i_row)
    # [NODES]
    o_node = tl.arange(0, NODES)
    m_node = o_node < num_nodes
    b_tokens = tl.load(p_tokens + o_node, mask=m_node, other=-1).to(tl.int32)
    # No node has itself for a parent, nor any beyond the last.
    b_parents = tl.load(p_parents + o_node, mask=m_node, other=NODES).to(tl.int32)
    # [BLOCK_DEPTH]
    o_depth = tl.arange(0, BLOCK_DEPTH)
    b_path = tl.full([BLOCK_DEPTH], -1, tl.int64)
    # NODES: the walk has ended.
    node = tl.full([], -1, tl.int32)
    length = tl.full([], 0, tl.int32)
    next_token = tl.full([], -1, tl.int64)
    while node < NODES:
        i_scores = start + 1 + node
        p_row = p_scores + i_scores * scores_stride
        p_q = p_draft + tl.load(p_draft_rows + i_scores) * draft_stride if HAS_DRAFT else p_draft
        best = best_key(p_row, VOCAB, BLOCK)
        top = scores_of(best)
        m_child = (b_parents == node) & (length < max_depth)
        following = tl.full([], NODES, tl.int32)
        if tl.abs(top) < INFINITY:
            next_token = tokens_of(best)
            if sampled:
                following, next_token = _sample(
                    p_row, p_q, top, next_token, p_tokens, b_tokens, m_child, seed, sample_index, position, length,
                    HAS_DRAFT, VOCAB, BLOCK, NODES,
                )  # fmt: skip
            else:
                following = tl.min(tl.where(m_child & (b_tokens == next_token), o_node, NODES), 0)
        else:
            next_token = tl.full([], -1, tl.int64)
        b_path = tl.where((o_depth == length) & (following < NODES), following, b_path)
        length += (following < NODES).to(tl.int32)
        node = following
    tl.store(p_paths + i_row * max_depth + o_depth, b_path, mask=o_depth < max_depth)
    tl.store(p_lengths + i_row, length.to(tl.int64))
    tl.store(p_next_tokens + i_row, next_token)


@triton.jit
def _sample(
    p_row,  # [VOCAB], scores of the node
    p_q,  # [VOCAB], what its children were drawn from; None without HAS_DRAFT
    top,  # largest score
    likeliest,  # its token
    p_tokens,  # [nodes]
    b_tokens,  # [NODES]
    m_child,  # [NODES], the node's children
    seed,
    sample_index,
    position,
    length,  # nodes of the path so far
    HAS_DRAFT: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    """Return the child that is accepted and `likeliest`; or NODES, and a draw from what the children leave of p."""
    o_node = tl.arange(0, NODES)
    # Of the residual: its sum, the share of q in it, the sum of q, and the tokens lost.
    total = tl.full([], 0, tl.float64)
    for begin in range(0, VOCAB, BLOCK):
        total += tl.sum(weights(p_row, top, begin, VOCAB, BLOCK), 0)
    share = tl.full([], 0, tl.float64)
    q_left = tl.full([], 1, tl.float64)
    m_lost = tl.full([NODES], 0, tl.int1)
    following = tl.full([], NODES, tl.int32)
    rank = tl.full([], 0, tl.int32)
    child = tl.min(tl.where(m_child, o_node, NODES), 0)
    while (child < NODES) & (following == NODES):
        token = tl.load(p_tokens + child)
        # Cantor's pairing, as in `PhiloxChance`.
        place = (length + rank) * (length + rank + 1) // 2 + rank
        coin = uniform(seed, sample_index, position, COIN, place)
        m_this = o_node == child
        if HAS_DRAFT:
            accepted, total, share, q_left, m_lost = _try_drawn(
                p_row, p_q, top, token, coin, m_this, total, share, q_left, b_tokens, m_lost, VOCAB, BLOCK
            )
        else:
            accepted, total, m_lost = _try_chosen(p_row, top, token, coin, m_this, total, m_lost)
        following = tl.where(accepted > 0, child, following)
        rank += 1
        child = tl.min(tl.where(m_child & (o_node > child), o_node, NODES), 0)
    next_token = likeliest
    if following == NODES:
        u = uniform(seed, sample_index, position + length, RESIDUAL, 0)
        drawn = draw(p_row, p_q, top, share, b_tokens, m_lost, u * total, HAS_DRAFT, VOCAB, BLOCK)
        next_token = tl.where(drawn >= 0, drawn, likeliest)
    return following, next_token


@triton.jit
def _try_drawn(
    p_row, p_q, top, token, coin, m_this, total, share, q_left, b_tokens, m_lost,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return 1 if a child that was drawn from q is accepted, else 0; and p and q, without what a rejection takes."""
    accepted = tl.full([], 0, tl.int32)
    weight = tl.exp(tl.load(p_row + token).to(tl.float32) - top).to(tl.float64)
    q = tl.load(p_q + token).to(tl.float64)
    # What q cannot have drawn is no draw from q, so its rejection says nothing.
    if q > 0:
        weight = rest(weight, share, q)
        if coin < (weight / total) / (q / q_left):
            accepted = tl.full([], 1, tl.int32)
        else:
            m_lost = m_lost | m_this
            total, share, q_left = _reject_drawn(p_row, p_q, top, total, share, q_left, b_tokens, m_lost, VOCAB, BLOCK)
    return accepted, total, share, q_left, m_lost


@triton.jit
def _reject_drawn(p_row, p_q, top, total, share, q_left, b_tokens, m_lost, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of max(p - q, 0), the share of q in it, and the sum of q without the tokens lost."""
    more = share + total / q_left
    w_sum = tl.full([], 0, tl.float64)
    q_sum = tl.full([], 0, tl.float64)
    for begin in range(0, VOCAB, BLOCK):
        b_q = draft_probs_of(p_q, begin, VOCAB, BLOCK)
        b_w = weights(p_row, top, begin, VOCAB, BLOCK)
        w_sum += tl.sum(rest(b_w, more, b_q), 0)
        q_sum += tl.sum(without(b_q, begin, b_tokens, m_lost, BLOCK), 0)
    # Where rounding has left nothing, p and q stay.
    if w_sum > 0:
        share, total = more, w_sum
    if q_sum > 0:
        q_left = q_sum
    return total, share, q_left


@triton.jit
def _try_chosen(p_row, top, token, coin, m_this, total, m_lost):
    """Return 1 if a child that was chosen without chance is accepted, else 0; and p, without what a rejection takes."""
    accepted = tl.full([], 0, tl.int32)
    weight = tl.exp(tl.load(p_row + token).to(tl.float32) - top).to(tl.float64)
    if coin < weight / total:
        accepted = tl.full([], 1, tl.int32)
    elif total - weight > 0:
        m_lost = m_lost | m_this
        total -= weight
    return accepted, total, m_lost
