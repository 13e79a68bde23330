# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""min_p, top_k and top_p of each row by a search among the scores: without sorting and without a host wait."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton.score_keys import INFINITY, ordered, score_bits

# Scores of a row that a program reads at a time. One program has the whole row, so it needs many loads in flight.
BLOCK_SIZE = 4096
# Bounds that one pass over a row tries: four reduce the range of 2**32 to one in 16 passes.
PIVOTS = 4
# Of minus infinity: above it lies what is possible.
LEAST = tl.constexpr(-(2**31) + 0x7FFFFF)


def filter_logits(scores: Tensor, limits: Tensor) -> Tensor:
    """Apply min_p, then keep the `top_k` largest, then the smallest set of those with mass `top_p`; in place.

    Of equal scores the lowest ids are kept. What is dropped becomes -inf. A row whose largest score is not finite, or
    that holds a NaN, keeps its largest and may keep all.

    Args:
        scores: float32 `[rows, vocab]`, not normalised; each row in one piece.
        limits: float32 `[rows, 3]`: min_p (0 to keep all), as a share of the likeliest token's chance; top_k (0 for
            all); top_p (1 for all).

    Returns:
        `scores`.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    if scores.ndim != 2 or not scores.shape[1] or scores.stride(1) != 1 or scores.dtype != torch.float32:
        raise ValueError(
            f"scores {tuple(scores.shape)} {scores.dtype}, strides {scores.stride()}: not [rows, vocab] of float32"
        )
    rows, vocab = scores.shape
    if limits.shape != (rows, 3) or limits.dtype != torch.float32 or not limits.is_contiguous():
        raise ValueError(f"limits {tuple(limits.shape)} {limits.dtype}: not float32 {(rows, 3)} in one piece")
    if rows:
        block = min(BLOCK_SIZE, triton.next_power_of_2(vocab))
        filter_logits_kernel[(rows,)](
            scores, limits, scores.stride(0), VOCAB=vocab, BLOCK=block, PIVOTS=PIVOTS, num_warps=num_warps(block)
        )
    return scores


def num_warps(block: int) -> int:
    """Return the warps of a program: with more than four scores a thread, some sizes of vocabulary spill registers."""
    return max(1, min(32, block // 128))


@triton.jit
def filter_logits_kernel(
    p_scores,  # [rows, VOCAB]
    p_limits,  # [rows, 3]
    stride,  # run-time: scores may be columns of a wider tensor
    VOCAB: tl.constexpr,  # a model has one
    BLOCK: tl.constexpr,  # the shape of the registers
    PIVOTS: tl.constexpr,  # as above
):
    i_row = tl.program_id(0).to(tl.int64)
    p_scores += i_row * stride
    min_p = tl.load(p_limits + 3 * i_row)
    top_k = tl.load(p_limits + 3 * i_row + 1)
    top_p = tl.load(p_limits + 3 * i_row + 2)
    # One answer for the whole program: a row that asks for nothing is not even read.
    if (min_p > 0) | (top_k > 0) | (top_p < 1):
        best = _largest(p_scores, VOCAB, BLOCK)
        # Of others the sampler says what they are.
        if best < INFINITY:
            _filter(p_scores, best, min_p, top_k, top_p, VOCAB, BLOCK, PIVOTS)


@triton.jit
def _filter(p_scores, best, min_p, top_k, top_p, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Drop what the limits exclude from a row whose largest score is finite."""
    least = tl.full((), LEAST + 1, tl.int32)
    if min_p > 0:
        least = tl.maximum(least, score_bits(best + tl.log(min_p)))
    high = score_bits(best) + 1
    # How many of those that equal the least are kept; and the mass of all that are, in units of the largest's.
    room = tl.full((), VOCAB, tl.float32)
    count, mass = _above(p_scores, best, least, VOCAB, BLOCK)
    if (top_k > 0) & (top_k < count):
        least, above = _search(p_scores, best, least, high, top_k, False, VOCAB, BLOCK, PIVOTS)
        room = top_k - above
        _, mass = _above(p_scores, best, least + 1, VOCAB, BLOCK)
        mass += room * _weight(least, best)
    if top_p < 1:
        # More than 0, which nothing at all would reach, where top_p is less than the least number.
        wanted = tl.maximum(top_p * mass, 1e-30)
        bound, above = _search(p_scores, best, least, high, wanted, True, VOCAB, BLOCK, PIVOTS)
        weight = _weight(bound, best)
        # As many as it takes to get there; the likeliest token always stays.
        lacking = tl.maximum(tl.ceil((wanted - above) / tl.where(weight > 0, weight, 1.0)), 1.0)
        room = tl.where(bound == least, tl.minimum(room, lacking), lacking)
        least = bound
    taken = 0
    for start in range(0, VOCAB, BLOCK):
        # [BLOCK]
        o_token = start + tl.arange(0, BLOCK)
        bits = _load_bits(p_scores, o_token, VOCAB)
        is_least = (bits == least).to(tl.int32)
        rank = taken + tl.cumsum(is_least, 0)
        taken += tl.sum(is_least, 0)
        kept = (bits > least) | ((bits == least) & (rank <= room))
        tl.store(p_scores + o_token, -INFINITY, mask=(o_token < VOCAB) & ~kept)


@triton.jit
def _search(
    p_scores, best, low, high, wanted,
    BY_MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Return the largest bound from `low` to `high` with `wanted` at or above it, and how much lies above it.

    Args:
        low: a bound with enough at or above it.
        high: a bound with too little at or above it.
        wanted: a number of scores, or a mass.
    """
    above = tl.full((), 0.0, tl.float32)
    o_pivot = tl.arange(0, PIVOTS)
    # Wide enough for their difference.
    low, high = low.to(tl.int64), high.to(tl.int64)
    while high - low > 1:
        step = (high - low + PIVOTS - 1) // PIVOTS
        # [PIVOTS], low first
        pivots = (low + step * o_pivot).to(tl.int32)
        # Summed at the end: a sum over all threads takes longer than a block's scores.
        parts = tl.zeros([PIVOTS, BLOCK], dtype=tl.float32)
        for start in range(0, VOCAB, BLOCK):
            # [BLOCK]
            bits = _load_bits(p_scores, start + tl.arange(0, BLOCK), VOCAB)
            # [PIVOTS, BLOCK]
            reaches = bits[None, :] >= pivots[:, None]
            if BY_MASS:
                parts += tl.where(reaches, _weight(bits, best)[None, :], 0.0)
            else:
                parts += reaches.to(tl.float32)
        found = tl.sum(parts, 1)
        # Sums of fewer of the same numbers in the same order are no larger, so what is enough comes first.
        enough = tl.sum(((found >= wanted) | (o_pivot == 0)).to(tl.int32), 0)
        bound = low + step * enough
        if (enough < PIVOTS) & (bound < high):
            high = bound
            above = tl.sum(tl.where(o_pivot == enough, found, 0.0), 0)
        low += step * (enough - 1)
    return low.to(tl.int32), above


@triton.jit
def _above(p_scores, best, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of scores at or above a bound, and their mass."""
    # Summed at the end.
    count = tl.zeros([BLOCK], dtype=tl.float32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, VOCAB, BLOCK):
        bits = _load_bits(p_scores, start + tl.arange(0, BLOCK), VOCAB)
        reaches = bits >= least
        count += reaches.to(tl.float32)
        mass += tl.where(reaches, _weight(bits, best), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _largest(p_scores, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest score, infinity if one is NaN."""
    found = tl.full([BLOCK], -INFINITY, dtype=tl.float32)
    for start in range(0, VOCAB, BLOCK):
        o_token = start + tl.arange(0, BLOCK)
        b_scores = tl.load(p_scores + o_token, mask=o_token < VOCAB, other=-INFINITY)
        found = tl.maximum(found, tl.where(b_scores == b_scores, b_scores, INFINITY))
    best = tl.max(found, 0)
    # Where nothing is possible there is nothing to keep either.
    return tl.where(best == -INFINITY, INFINITY, best)


@triton.jit
def _load_bits(p_scores, o_token, VOCAB: tl.constexpr):
    """Return `score_bits` of scores, int32; tokens beyond the vocabulary are impossible."""
    return score_bits(tl.load(p_scores + o_token, mask=o_token < VOCAB, other=-INFINITY))


@triton.jit
def _weight(bits, best):
    """Return a score's probability relative to the largest one's."""
    return tl.exp(ordered(bits).to(tl.float32, bitcast=True) - best)
