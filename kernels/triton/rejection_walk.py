# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Rejection sampling down the draft trees of a batch, on the device."""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton.coupled_walk import block_size, check_trees, empty_walk
from specdec.kernels.triton.gumbel_argmax import check_rows
from specdec.kernels.triton.residual import (
    BLOCK_SIZE,
    COIN,
    RESIDUAL,
    draft_probs_of,
    draw,
    left,
    rest,
    scale_of,
    statistics,
    uniform,
    weight_of,
    weights,
    without,
)
from specdec.kernels.triton.score_keys import INFINITY, NOTHING, scores_of, tokens_of
from specdec.kernels.types.types import DraftProbs, NoiseColumns, PackedTrees, Walk

# For whole parts of scores. As many for smaller ones would each be left too few registers.
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
    *parts, max_nodes, max_depth = trees
    rows = trees.starts.numel() - 1
    check_rows(scores, noise, rows)
    check_trees(scores, trees, draft_probs)
    vocab = scores.shape[1]
    walk = empty_walk(rows, max_depth, scores.device)
    if rows:
        block = min(triton.next_power_of_2(vocab), BLOCK_SIZE)
        num_warps = max(1, min(NUM_WARPS, block // 128))
        best, sums = statistics(scores, block, num_warps)
        count = best.shape[1]
        rejection_walk_kernel[(rows,)](
            scores, best, sums, *(draft_probs or (None, None)), *parts, *noise, *walk, scores.stride(0),
            0 if draft_probs is None else draft_probs.table.stride(0), max_depth, HAS_DRAFT=draft_probs is not None,
            VOCAB=vocab, BLOCK=block, COUNT=count, PARTS=triton.next_power_of_2(count),
            NODES=block_size(max_nodes, max_depth), num_warps=num_warps,
        )  # fmt: skip
    return walk


# The columns of a table of nodes may begin anywhere.
@triton.jit(do_not_specialize=["max_depth"], do_not_specialize_on_alignment=["p_tokens", "p_parents", "p_draft_rows"])
def rejection_walk_kernel(
    p_scores,  # [rows + nodes, VOCAB]
    p_best,  # [rows + nodes, COUNT]: keys of parts
    p_sums,  # [rows + nodes, COUNT]: their weights
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
    BLOCK: tl.constexpr,  # tokens of a part, the shape of the registers
    COUNT: tl.constexpr,  # of parts
    PARTS: tl.constexpr,  # the shape of the registers
    NODES: tl.constexpr,  # of a tree or path, as above
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
    o_part = tl.arange(0, PARTS)
    b_path = tl.full([NODES], -1, tl.int64)
    # NODES: the walk has ended.
    node = tl.full([], -1, tl.int32)
    length = tl.full([], 0, tl.int32)
    next_token = tl.full([], -1, tl.int64)
    while node < NODES:
        i_scores = start + 1 + node
        p_row = p_scores + i_scores * scores_stride
        p_q = p_draft + tl.load(p_draft_rows + i_scores) * draft_stride if HAS_DRAFT else p_draft
        p_tops = p_best + i_scores * COUNT
        # [PARTS]
        b_keys = tl.load(p_tops + o_part, mask=o_part < COUNT, other=NOTHING)
        best = tl.max(b_keys, 0)
        top = scores_of(best)
        m_child = (b_parents == node) & (length < max_depth)
        following = tl.full([], NODES, tl.int32)
        if tl.abs(top) < INFINITY:
            next_token = tokens_of(best)
            if sampled:
                b_totals = tl.load(p_sums + i_scores * COUNT + o_part, mask=o_part < COUNT, other=0.0)
                # Behind the last part there is no top.
                b_totals *= tl.where(o_part < COUNT, scale_of(scores_of(b_keys), top), 0.0)
                following, next_token = _sample(
                    p_row, p_tops, p_q, top, b_totals, next_token, p_tokens, b_tokens, m_child, seed, sample_index,
                    position, length, HAS_DRAFT, VOCAB, BLOCK, PARTS, NODES,
                )  # fmt: skip
            else:
                following = tl.min(tl.where(m_child & (b_tokens == next_token), o_node, NODES), 0)
        else:
            next_token = tl.full([], -1, tl.int64)
        b_path = tl.where((o_node == length) & (following < NODES), following, b_path)
        length += (following < NODES).to(tl.int32)
        node = following
    tl.store(p_paths + i_row * max_depth + o_node, b_path, mask=o_node < max_depth)
    tl.store(p_lengths + i_row, length.to(tl.int64))
    tl.store(p_next_tokens + i_row, next_token)


@triton.jit
def _sample(
    p_row,  # [VOCAB], scores of the node
    p_tops,  # [COUNT], keys of their parts
    p_q,  # [VOCAB], what its children were drawn from; None without HAS_DRAFT
    top,  # largest score
    b_totals,  # [PARTS], weights of the parts
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
    PARTS: tl.constexpr,
    NODES: tl.constexpr,
):
    """Return the child that is accepted and `likeliest`; or NODES, and a draw from what the children leave of p."""
    o_node = tl.arange(0, NODES)
    # Of the residual, whose parts are in `b_totals`: the share of q in it, the sum of q, and the tokens lost.
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
            accepted, b_totals, share, q_left, m_lost = _try_drawn(
                p_row, p_tops, p_q, top, b_totals, token, coin, m_this, share, q_left, b_tokens, m_lost,
                VOCAB, BLOCK, PARTS,
            )  # fmt: skip
        else:
            accepted, b_totals, m_lost = _try_chosen(
                p_row, p_tops, p_q, top, b_totals, token, coin, m_this, share, b_tokens, m_lost, VOCAB, BLOCK, PARTS
            )
        following = tl.where(accepted > 0, child, following)
        rank += 1
        child = tl.min(tl.where(m_child & (o_node > child), o_node, NODES), 0)
    next_token = likeliest
    if following == NODES:
        u = uniform(seed, sample_index, position + length, RESIDUAL, 0)
        drawn = draw(p_row, p_tops, p_q, top, b_totals, share, b_tokens, m_lost, u, HAS_DRAFT, VOCAB, BLOCK, PARTS)
        next_token = tl.where(drawn >= 0, drawn, likeliest)
    return following, next_token


@triton.jit
def _try_drawn(
    p_row, p_tops, p_q, top, b_totals, token, coin, m_this, share, q_left, b_tokens, m_lost,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return 1 if a child that was drawn from q is accepted, else 0; and p and q, without what a rejection takes."""
    accepted = tl.full([], 0, tl.int32)
    weight = weight_of(p_row, p_tops, top, token, BLOCK)
    q = tl.load(p_q + token).to(tl.float64)
    # What q cannot have drawn is no draw from q, so its rejection says nothing.
    if q > 0:
        weight = rest(weight, share, q)
        if coin < (weight / tl.sum(b_totals, 0)) / (q / q_left):
            accepted = tl.full([], 1, tl.int32)
        else:
            m_lost = m_lost | m_this
            b_totals, share, q_left = _reject_drawn(
                p_row, p_tops, p_q, top, b_totals, share, q_left, b_tokens, m_lost, VOCAB, BLOCK, PARTS
            )
    return accepted, b_totals, share, q_left, m_lost


@triton.jit
def _reject_drawn(
    p_row, p_tops, p_q, top, b_totals, share, q_left, b_tokens, m_lost,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the parts of max(p - q, 0), the share of q in it, and the sum of q without the tokens lost."""
    more = share + tl.sum(b_totals, 0) / q_left
    o_part = tl.arange(0, PARTS)
    b_rests = tl.zeros([PARTS], tl.float64)
    q_sum = tl.full([], 0, tl.float64)
    for begin in range(0, VOCAB, BLOCK):
        b_q = draft_probs_of(p_q, begin, VOCAB, BLOCK)
        b_w = weights(p_row, p_tops, top, begin, VOCAB, BLOCK)
        b_rests = tl.where(o_part == begin // BLOCK, tl.sum(rest(b_w, more, b_q), 0), b_rests)
        q_sum += tl.sum(without(b_q, begin, b_tokens, m_lost, BLOCK), 0)
    # Where rounding has left nothing, p and q stay.
    if tl.sum(b_rests, 0) > 0:
        share, b_totals = more, b_rests
    if q_sum > 0:
        q_left = q_sum
    return b_totals, share, q_left


@triton.jit
def _try_chosen(
    p_row, p_tops, p_q, top, b_totals, token, coin, m_this, share, b_tokens, m_lost,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return 1 if a child that was chosen without chance is accepted, else 0; and p, without what a rejection takes."""
    accepted = tl.full([], 0, tl.int32)
    if coin < weight_of(p_row, p_tops, top, token, BLOCK) / tl.sum(b_totals, 0):
        accepted = tl.full([], 1, tl.int32)
    else:
        # Its part is added up anew: a difference would leave a rounding where nothing is left.
        part = (token // BLOCK).to(tl.int32)
        m_fewer = m_lost | m_this
        b_w = left(p_row, p_tops, p_q, top, share, part * BLOCK, b_tokens, m_fewer, False, VOCAB, BLOCK)
        b_fewer = tl.where(tl.arange(0, PARTS) == part, tl.sum(b_w, 0), b_totals)
        if tl.sum(b_fewer, 0) > 0:
            m_lost, b_totals = m_fewer, b_fewer
    return accepted, b_totals, m_lost
