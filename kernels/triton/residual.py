# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Functions of the rejection rule's kernels: weights of tokens, what rejections leave of them, coins, draws.

A row of scores is cut into parts of `BLOCK_SIZE`. A token's weight is `w = exp(score - top of its part) * scale of the
part`, scale = exp(top of its part - top of the row): a first kernel finds tops and sums of all parts at once, and the
walk reads only parts that a choice depends on. A rounding of float32 is made once, in the first factor. All sums,
quotients and differences are float64: whatever is rejected, the output follows w to 2**-50 or so, where float32 would
lose what little a rejection leaves. What is left after any number of rejections is `max(w - share * q, 0)`, and so
takes no memory of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton.philox import philox_words
from specdec.kernels.triton.score_keys import INFINITY, score_keys, scores_of
from specdec.kernels.types.types import Stream

# Tokens of a part, which a program reads at once.
BLOCK_SIZE = 4096
# A step's coins, and the draw of its last token.
COIN = tl.constexpr(int(Stream.COIN))
RESIDUAL = tl.constexpr(int(Stream.RESIDUAL))
GRID = tl.constexpr(2.0**-53)


def statistics(scores: Tensor, block: int, num_warps: int) -> tuple[Tensor, Tensor]:
    """Return of each part of a row the key of its largest score, and the sum of its tokens' weights without the scale.

    NaN counts as infinity, since neither is valid; a part without any score has weight 0.

    Args:
        scores: `[rows, vocab]`, each row in one piece.
        block: tokens of a part, a power of two.

    Returns:
        int64 and float64 `[rows, parts]`.
    """
    rows, vocab = scores.shape
    parts = triton.cdiv(vocab, block)
    best = torch.empty(rows, parts, dtype=torch.int64, device=scores.device)
    sums = torch.empty(rows, parts, dtype=torch.float64, device=scores.device)
    statistics_kernel[(rows, parts)](
        scores, best, sums, scores.stride(0), VOCAB=vocab, BLOCK=block, num_warps=num_warps
    )
    return best, sums


@triton.jit
def statistics_kernel(
    p_scores,  # [rows, VOCAB]
    p_best,  # [rows, parts]: keys
    p_sums,  # [rows, parts]
    stride,  # run-time: scores may be columns of a wider tensor
    VOCAB: tl.constexpr,  # a model has one
    BLOCK: tl.constexpr,  # the shape of the registers
):
    i_row = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1)
    # [BLOCK]
    o_token = i_part * BLOCK + tl.arange(0, BLOCK)
    b_scores = tl.load(p_scores + i_row * stride + o_token, mask=o_token < VOCAB, other=-INFINITY).to(tl.float32)
    b_scores = tl.where(b_scores == b_scores, b_scores, INFINITY)
    best = tl.max(score_keys(b_scores, o_token), 0)
    i_result = i_row * tl.num_programs(1) + i_part
    tl.store(p_best + i_result, best)
    tl.store(p_sums + i_result, tl.sum(unscaled(b_scores, scores_of(best)), 0))


@triton.jit
def unscaled(b_scores, top):
    """Return `exp(score - top)` of a part, float64; 0 where no token has a score."""
    return tl.exp(b_scores - tl.where(tl.abs(top) < INFINITY, top, 0.0)).to(tl.float64)


@triton.jit
def scale_of(part_top, top):
    """Return the scale of parts by their tops and that of the row, float64."""
    return tl.exp(part_top.to(tl.float64) - top.to(tl.float64))


@triton.jit
def weight_of(p_row, p_best, top, token, BLOCK: tl.constexpr):
    """Return the weight of a token, float64."""
    part_top = scores_of(tl.load(p_best + token // BLOCK))
    return unscaled(tl.load(p_row + token).to(tl.float32), part_top) * scale_of(part_top, top)


@triton.jit
def weights(p_row, p_best, top, begin, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the weights of the tokens of the part that begins there, float64 `[BLOCK]`."""
    o_token = begin + tl.arange(0, BLOCK)
    b_scores = tl.load(p_row + o_token, mask=o_token < VOCAB, other=-INFINITY).to(tl.float32)
    part_top = scores_of(tl.load(p_best + begin // BLOCK))
    return unscaled(b_scores, part_top) * scale_of(part_top, top)


@triton.jit
def draft_probs_of(p_q, begin, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the draft probabilities of tokens from `begin` on, float64 `[BLOCK]`."""
    o_token = begin + tl.arange(0, BLOCK)
    return tl.load(p_q + o_token, mask=o_token < VOCAB, other=0).to(tl.float64)


@triton.jit
def rest(w, share, q):
    """Return `max(w - share * q, 0)`."""
    return tl.maximum(w - share * q, 0.0)


@triton.jit
def left(
    p_row, p_best, p_q, top, share, begin, b_tokens, m_lost,
    HAS_DRAFT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the weights that rejections have left of the tokens of a part, float64 `[BLOCK]`."""
    b_left = weights(p_row, p_best, top, begin, VOCAB, BLOCK)
    if HAS_DRAFT:
        # Where nothing was drawn there is no q to be read.
        if share > 0:
            b_left = rest(b_left, share, draft_probs_of(p_q, begin, VOCAB, BLOCK))
    else:
        b_left = without(b_left, begin, b_tokens, m_lost, BLOCK)
    return b_left


@triton.jit
def draw(
    p_row, p_best, p_q, top, b_totals, share, b_tokens, m_lost, u,
    HAS_DRAFT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the first token at which the cumulative residual exceeds a share `u` of it; -1 if it is empty, int64."""
    bound = u * tl.sum(b_totals, 0)
    # [PARTS]; where rounding puts it behind the last part, that.
    o_part = tl.arange(0, PARTS)
    b_ends = tl.cumsum(b_totals, 0)
    first = tl.min(tl.where((b_ends > bound) & (b_totals > 0), o_part, PARTS), 0)
    part = tl.minimum(first, tl.max(tl.where(b_totals > 0, o_part, -1), 0))
    token = tl.full([], -1, tl.int64)
    if part >= 0:
        before = tl.sum(tl.where(o_part < part, b_totals, 0.0), 0)
        b_w = left(p_row, p_best, p_q, top, share, part * BLOCK, b_tokens, m_lost, HAS_DRAFT, VOCAB, BLOCK)
        b_sums = before + tl.cumsum(b_w, 0)
        # [BLOCK]
        o_token = tl.arange(0, BLOCK)
        first = tl.min(tl.where((b_sums > bound) & (b_w > 0), o_token, BLOCK), 0)
        last = tl.max(tl.where(b_w > 0, o_token, 0), 0)
        token = (part * BLOCK + tl.minimum(first, last)).to(tl.int64)
    return token


@triton.jit
def without(b_w, begin, b_tokens, m_lost, BLOCK: tl.constexpr):
    """Return the weights of tokens from `begin` on, with 0 at rejected tokens."""
    m_here = m_lost & (b_tokens >= begin) & (b_tokens < begin + BLOCK)
    o_token = begin + tl.arange(0, BLOCK)
    token = tl.max(tl.where(m_here, b_tokens, -1), 0)
    while token >= 0:
        b_w = tl.where(o_token == token, 0.0, b_w)
        token = tl.max(tl.where(m_here & (b_tokens < token), b_tokens, -1), 0)
    return b_w


@triton.jit
def uniform(seed, sample_index, position, stream, place):
    """Return number `place` of `reference.noise.uniforms`, float64."""
    w_0, w_1, w_2, w_3 = philox_words(tl.cast(place // 4, tl.uint64), 0, stream, position, seed, sample_index)
    word = tl.where(place % 4 < 2, tl.where(place % 4 == 0, w_0, w_1), tl.where(place % 4 == 2, w_2, w_3))
    return tl.sum((word >> 11).to(tl.float64) * GRID, 0)
