# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Rejection sampling down the draft trees of a batch, on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.philox import philox_words
from specdec.kernels.reference import DTYPES
from specdec.kernels.reference_sampling import NoiseKeys, Walk
from specdec.kernels.score_keys import NOTHING, score_keys, scores_of, tokens_of

# Tokens that a program reads at once. A row of the batch has one program, and so all that a multiprocessor has.
BLOCK_SIZE = 4096
NUM_WARPS = 8
# Smaller trees take no less time, and would each have to be compiled for.
LEAST_NODES = 64
# Streams of `verify.noise`: a step's coins, and the draw of its last token.
COIN = tl.constexpr(2)
RESIDUAL = tl.constexpr(3)
GRID = tl.constexpr(2.0**-53)
INFINITY = tl.constexpr(float("inf"))


def rejection_walk(
    scores: Tensor,
    draft_probs: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    starts: Tensor,
    seeds: Tensor,
    sample_indices: Tensor,
    positions: Tensor,
    sampled: Tensor,
    max_nodes: int,
    max_depth: int,
) -> Walk:
    """Walk down from each root while a child is accepted, then emit a draw from what is left of p.

    The rule is that of `verify.rejection`: p = softmax(scores) of the node; a child x is accepted with probability
    min(1, p[x] / q[x]), else p becomes norm(max(p - q, 0)) and q loses x; without draft probabilities each child is
    its own q. The coins and the draw are those of `verify.chance`, to the bit.

    A rounding of float32 is made once, in `w = exp(score - largest)`. All sums, quotients and differences are float64:
    whatever is rejected, the output follows w to 2**-50 or so, where float32 would lose what little a rejection leaves.
    What is left after any number of rejections is `max(w - share * q, 0)`, and so takes no memory of its own.

    Args:
        scores: `[rows + nodes, vocab]`, float32, bfloat16 or float16; processed, not normalised; per row its root's,
            then its nodes', each in one piece.
        draft_probs: float32 `[rows + nodes, vocab]`, what the children of each root and node were drawn from, in
            their order and without replacement; None where children were chosen without chance.
        tokens: int64 `[nodes]` of the draft's nodes, row by row, parents before children; siblings differ.
        parents: int64 `[nodes]`, index of each node's parent within its row, -1 for a child of the root.
        starts: int64 `[rows + 1]`, where in `scores` each row begins, and the end.
        seeds, sample_indices, positions: int64 `[rows]`, from 0 to 2**63 - 1, the noise's key; the position is that
            of the token after the root. Of no meaning where a row is not sampled.
        sampled: bool `[rows]`, False where the row follows the argmax of its scores, lowest id on ties.
        max_nodes: at least the nodes of the largest tree.
        max_depth: nodes that a path may have; children of its last node are as if they were not there.

    Returns:
        The walk; it ends with -1 at a root or node whose largest score is no finite number, or that has a NaN.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    keys = NoiseKeys(seeds, sample_indices, positions)
    _check(scores, draft_probs, (tokens, parents, starts), keys, sampled)
    rows, vocab, device = starts.numel() - 1, scores.shape[1], scores.device
    walk = Walk(
        torch.empty(rows, max_depth, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
    )
    if rows:
        rejection_walk_kernel[(rows,)](
            scores,
            draft_probs,
            tokens,
            parents,
            starts,
            *keys,
            sampled,
            *walk,
            scores.stride(0),
            0 if draft_probs is None else draft_probs.stride(0),
            max_depth,
            HAS_DRAFT=draft_probs is not None,
            VOCAB=vocab,
            BLOCK=min(triton.next_power_of_2(vocab), BLOCK_SIZE),
            NODES=max(triton.next_power_of_2(max_nodes), LEAST_NODES),
            BLOCK_DEPTH=triton.next_power_of_2(max(max_depth, 1)),
            num_warps=NUM_WARPS,
        )
    return walk


def _check(
    scores: Tensor, draft_probs: Tensor | None, tree: tuple[Tensor, Tensor, Tensor], keys: NoiseKeys, sampled: Tensor
) -> None:
    """Raises ValueError where the arguments do not fit each other."""
    tokens, parents, starts = tree
    rows = starts.numel() - 1
    if tokens.shape != parents.shape or scores.shape[:1] != (rows + tokens.numel(),):
        raise ValueError(
            f"scores {tuple(scores.shape)}, {tokens.numel()} nodes, {parents.numel()} parents and {rows} rows "
            "do not fit each other"
        )
    if scores.ndim != 2 or not scores.shape[1] or scores.stride(1) != 1 or scores.dtype not in DTYPES:
        raise ValueError(
            f"scores {tuple(scores.shape)} {scores.dtype}, strides {scores.stride()}: not [rows, vocab] of {DTYPES}"
        )
    if draft_probs is not None and (
        draft_probs.shape != scores.shape or draft_probs.dtype != torch.float32 or draft_probs.stride(1) != 1
    ):
        raise ValueError(
            f"draft_probs {tuple(draft_probs.shape)} {draft_probs.dtype}, strides {draft_probs.stride()}: "
            f"not float32 {tuple(scores.shape)}, as there are scores"
        )
    if {part.dtype for part in tree} != {torch.int64} or not all(part.is_contiguous() for part in tree):
        kinds = [(part.dtype, part.stride()) for part in tree]
        raise ValueError(f"tokens, parents and starts are {kinds}: all must be int64 in one piece")
    for name, part in keys._asdict().items():
        if part.shape != (rows,) or part.dtype != torch.int64 or not part.is_contiguous():
            raise ValueError(f"{name} {tuple(part.shape)} {part.dtype}: not int64 {(rows,)}, as there are rows")
    if sampled.shape != (rows,) or sampled.dtype != torch.bool or not sampled.is_contiguous():
        raise ValueError(f"sampled {tuple(sampled.shape)} {sampled.dtype}: not bool {(rows,)}, as there are rows")


@triton.jit(do_not_specialize=["max_depth"])
def rejection_walk_kernel(
    p_scores,  # [rows + nodes, VOCAB]
    p_draft,  # [rows + nodes, VOCAB], or None
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
    draft_stride,  # likewise
    max_depth,  # run-time: the deepest tree of the step
    HAS_DRAFT: tl.constexpr,  # two rules
    VOCAB: tl.constexpr,  # a model has one
    BLOCK: tl.constexpr,  # the shape of the registers
    NODES: tl.constexpr,  # likewise
    BLOCK_DEPTH: tl.constexpr,  # likewise, of a path
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
        p_q = p_draft + i_scores * draft_stride if HAS_DRAFT else p_draft
        best = _best(p_row, VOCAB, BLOCK)
        top = scores_of(best)
        m_child = (b_parents == node) & (length < max_depth)
        following = tl.full([], NODES, tl.int32)
        if tl.abs(top) < INFINITY:
            next_token = tokens_of(best)
            if sampled:
                total = tl.full([], 0, tl.float64)
                share = tl.full([], 0, tl.float64)
                q_left = tl.full([], 1, tl.float64)
                m_lost = tl.full([NODES], 0, tl.int1)
                for begin in range(0, VOCAB, BLOCK):
                    total += tl.sum(_weights(p_row, top, begin, VOCAB, BLOCK), 0)
                rank = tl.full([], 0, tl.int32)
                child = tl.min(tl.where(m_child, o_node, NODES), 0)
                while (child < NODES) & (following == NODES):
                    token = tl.load(p_tokens + child)
                    weight = tl.exp(tl.load(p_row + token).to(tl.float32) - top).to(tl.float64)
                    # Cantor's pairing, as in `PhiloxChance`.
                    place = (length + rank) * (length + rank + 1) // 2 + rank
                    coin = _uniform(seed, sample_index, position, COIN, place)
                    if HAS_DRAFT:
                        q = tl.load(p_q + token).to(tl.float64)
                        # What q cannot have drawn is no draw from q, so its rejection says nothing.
                        if q > 0:
                            weight = _rest(weight, share, q)
                            if coin < (weight / total) / (q / q_left):
                                following = child
                            else:
                                m_lost = m_lost | (o_node == child)
                                more = share + total / q_left
                                w_sum = tl.full([], 0, tl.float64)
                                q_sum = tl.full([], 0, tl.float64)
                                for begin in range(0, VOCAB, BLOCK):
                                    b_q = _draft(p_q, begin, VOCAB, BLOCK)
                                    b_w = _weights(p_row, top, begin, VOCAB, BLOCK)
                                    w_sum += tl.sum(_rest(b_w, more, b_q), 0)
                                    q_sum += tl.sum(_without(b_q, begin, b_tokens, m_lost, BLOCK), 0)
                                # Where rounding has left nothing, p and q stay.
                                if w_sum > 0:
                                    share, total = more, w_sum
                                if q_sum > 0:
                                    q_left = q_sum
                    else:
                        if coin < weight / total:
                            following = child
                        elif total - weight > 0:
                            m_lost = m_lost | (o_node == child)
                            total -= weight
                    rank += 1
                    child = tl.min(tl.where(m_child & (o_node > child), o_node, NODES), 0)
                if following == NODES:
                    # The first token whose sum is above u of the whole. At first the block in which it lies; where
                    # rounding puts it behind the last, that.
                    u = _uniform(seed, sample_index, position + length, RESIDUAL, 0)
                    bound = u * total
                    seen = tl.full([], 0, tl.float64)
                    before = tl.full([], 0, tl.float64)
                    chosen = tl.full([], -1, tl.int32)
                    begin = tl.full([], 0, tl.int32)
                    while (begin < VOCAB) & (seen <= bound):
                        b_w = _left(p_row, p_q, top, share, begin, b_tokens, m_lost, HAS_DRAFT, VOCAB, BLOCK)
                        part = tl.sum(b_w, 0)
                        if part > 0:
                            chosen, before = begin, seen
                        seen += part
                        begin += BLOCK
                    if chosen >= 0:
                        b_w = _left(p_row, p_q, top, share, chosen, b_tokens, m_lost, HAS_DRAFT, VOCAB, BLOCK)
                        b_sums = before + tl.cumsum(b_w, 0)
                        # [BLOCK]
                        o_token = tl.arange(0, BLOCK)
                        first = tl.min(tl.where((b_sums > bound) & (b_w > 0), o_token, BLOCK), 0)
                        last = tl.max(tl.where(b_w > 0, o_token, 0), 0)
                        next_token = (chosen + tl.minimum(first, last)).to(tl.int64)
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
def _best(p_row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Key of the largest score of a row; NaN counts as infinity, since neither is an answer."""
    # [BLOCK]
    b_best = tl.full([BLOCK], NOTHING, tl.int64)
    for begin in range(0, VOCAB, BLOCK):
        o_token = begin + tl.arange(0, BLOCK)
        b_scores = tl.load(p_row + o_token, mask=o_token < VOCAB, other=-INFINITY).to(tl.float32)
        b_scores = tl.where(b_scores == b_scores, b_scores, INFINITY)
        b_best = tl.maximum(b_best, score_keys(b_scores, o_token))
    return tl.max(b_best, 0)


@triton.jit
def _weights(p_row, top, begin, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """float64 `[BLOCK]`: `exp(score - top)` of tokens from `begin` on."""
    o_token = begin + tl.arange(0, BLOCK)
    b_scores = tl.load(p_row + o_token, mask=o_token < VOCAB, other=-INFINITY).to(tl.float32)
    return tl.exp(b_scores - top).to(tl.float64)


@triton.jit
def _draft(p_q, begin, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """float64 `[BLOCK]`: draft probabilities of tokens from `begin` on."""
    o_token = begin + tl.arange(0, BLOCK)
    return tl.load(p_q + o_token, mask=o_token < VOCAB, other=0).to(tl.float64)


@triton.jit
def _rest(w, share, q):
    """`max(w - share * q, 0)`."""
    return tl.maximum(w - share * q, 0.0)


@triton.jit
def _left(
    p_row, p_q, top, share, begin, b_tokens, m_lost, HAS_DRAFT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """float64 `[BLOCK]`: what the rejections have left of tokens from `begin` on."""
    b_w = _weights(p_row, top, begin, VOCAB, BLOCK)
    if HAS_DRAFT:
        b_left = _rest(b_w, share, _draft(p_q, begin, VOCAB, BLOCK))
    else:
        b_left = _without(b_w, begin, b_tokens, m_lost, BLOCK)
    return b_left


@triton.jit
def _without(b_w, begin, b_tokens, m_lost, BLOCK: tl.constexpr):
    """The weights of tokens from `begin` on, with 0 at the tokens lost."""
    m_here = m_lost & (b_tokens >= begin) & (b_tokens < begin + BLOCK)
    o_token = begin + tl.arange(0, BLOCK)
    token = tl.max(tl.where(m_here, b_tokens, -1), 0)
    while token >= 0:
        b_w = tl.where(o_token == token, 0.0, b_w)
        token = tl.max(tl.where(m_here & (b_tokens < token), b_tokens, -1), 0)
    return b_w


@triton.jit
def _uniform(seed, sample_index, position, stream, place):
    """float64: number `place` of `verify.noise.uniforms`."""
    w_0, w_1, w_2, w_3 = philox_words(
        tl.cast(place // 4, tl.uint64),
        tl.cast(0, tl.uint64),
        tl.cast(stream, tl.uint64),
        tl.cast(position, tl.uint64),
        tl.cast(seed, tl.uint64),
        tl.cast(sample_index, tl.uint64),
    )
    word = tl.where(place % 4 < 2, tl.where(place % 4 == 0, w_0, w_1), tl.where(place % 4 == 2, w_2, w_3))
    return tl.sum((word >> 11).to(tl.float64) * GRID, 0)
