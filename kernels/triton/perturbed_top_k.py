# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Top k of scores, with the position's own noise in sampled rows: the children that a drafter considers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton.gumbel_argmax import check_rows
from specdec.kernels.triton.philox import gumbel, token_words, words_of
from specdec.kernels.triton.score_keys import INFINITY, LOW_HALF, NOTHING, score_keys, scores_of, tokens_of
from specdec.kernels.types.types import NoiseColumns, TopK

MAX_K = 64
# Tokens of a program. Twice those of the argmax: the second pass holds k keys of every part.
BLOCK_SIZE = 2048
# Where columns stand for tokens of their own, of which each takes a counter of its own.
OWN_BLOCK_SIZE = 512


def perturbed_top_k(
    scores: Tensor, noise: NoiseColumns, k: int, tokens: Tensor | None = None, stream: int = 0, lane: int = 0
) -> TopK:
    """Return the k largest of `scores[v] + G(seed, sample index, position, v)`: k draws without replacement.

    This is Gumbel top-k (Kool et al. 2019).

    Args:
        scores: `[rows, n]`, float32, bfloat16 or float16; need not be normalised; NaN counts as -inf; each
            row in one piece.
        noise: of each row.
        k: from 1 to `MAX_K` and n.
        tokens: int64 `[n]`, which tokens v are scored, from 0 to 2**32 - 2, distinct and in any order, in one piece;
            None for 0 .. n - 1.
        stream: a `Stream`, what the noise is for.
        lane: distinguishes independent vectors of one position and stream.

    Raises:
        ValueError: shapes, strides or dtypes are others, or `k` is out of its range.
    """
    check_rows(scores, noise)
    rows, columns = scores.shape
    if not 1 <= k <= min(MAX_K, columns):
        raise ValueError(f"k is {k}; it must be from 1 to {min(MAX_K, columns)}")
    size = BLOCK_SIZE
    if tokens is not None:
        _check_tokens(tokens, columns)
        size = min(OWN_BLOCK_SIZE, triton.next_power_of_2(columns))
    device = scores.device
    found = TopK(
        torch.empty(rows, k, dtype=torch.int64, device=device),
        torch.empty(rows, k, device=device),
        torch.empty(rows, device=device),
    )
    if rows:
        parts = triton.cdiv(columns, size)
        best = torch.empty(rows, parts, k, dtype=torch.int64, device=device)
        sums = torch.empty(rows, parts, device=device)
        top_k_of_part_kernel[(rows, parts)](
            scores, tokens, *noise, best, sums, scores.stride(0), k, stream, lane, COLUMNS=columns, BLOCK=size,
            num_warps=4,
        )  # fmt: skip
        block = triton.next_power_of_2(parts * k)
        top_k_of_parts_kernel[(rows,)](
            best, sums, *found, k, PARTS=parts, BLOCK=block, BLOCK_PARTS=triton.next_power_of_2(parts), num_warps=min(8,
            max(1, block // 256)),
        )  # fmt: skip
    return found


def _check_tokens(tokens: Tensor, columns: int) -> None:
    if tokens.shape != (columns,) or tokens.dtype != torch.int64 or not tokens.is_contiguous():
        raise ValueError(
            f"tokens {tuple(tokens.shape)} {tokens.dtype}, strides {tokens.stride()}: not {columns} of int64 in one "
            "piece, one for each column of the scores"
        )


@triton.jit(do_not_specialize=["k", "stream", "lane"], do_not_specialize_on_alignment=["p_positions"])
def top_k_of_part_kernel(
    p_scores,  # [rows, COLUMNS]
    p_tokens,  # [COLUMNS], which tokens they stand for; None for every one in order
    p_seeds,  # [rows]
    p_sample_indices,  # [rows]
    p_positions,  # [rows]
    p_sampled,  # [rows]
    p_best,  # [rows, parts, k]: keys
    p_sums,  # [rows, parts]
    stride,  # run-time: scores may be columns of a wider tensor
    k,  # run-time: a loop's end, which every tree shape sets anew
    stream,  # run-time: one word of the counter
    lane,  # run-time: another
    COLUMNS: tl.constexpr,  # a readout has one number
    BLOCK: tl.constexpr,  # the shape of the registers
):
    i_row = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1)
    # [BLOCK]
    o_column = i_part * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < COLUMNS
    b_scores = tl.load(p_scores + i_row * stride + o_column, mask=m_column, other=-INFINITY).to(tl.float32)
    # Scores beyond the columns are -inf and have the highest ids, so they come last.
    o_token = o_column if p_tokens is None else tl.load(p_tokens + o_column, mask=m_column, other=LOW_HALF)
    # One answer for the whole program: a greedy row computes no noise.
    if tl.load(p_sampled + i_row):
        seed = tl.load(p_seeds + i_row)
        sample_index = tl.load(p_sample_indices + i_row)
        position = tl.load(p_positions + i_row)
        if p_tokens is None:
            words = token_words(i_part * BLOCK, seed, sample_index, position, stream, lane, BLOCK)
        else:
            words = words_of(o_token, seed, sample_index, position, stream, lane)
        b_scores += gumbel(words)
    b_scores = tl.where(b_scores == b_scores, b_scores, -INFINITY)
    i_sum = i_row * tl.num_programs(1) + i_part
    tl.store(p_sums + i_sum, _log_sum_exp(b_scores))
    b_keys = score_keys(b_scores, o_token)
    for rank in range(k):
        best = tl.max(b_keys, 0)
        tl.store(p_best + i_sum * k + rank, best)
        b_keys = tl.where(b_keys == best, NOTHING, b_keys)


@triton.jit(do_not_specialize=["k"])
def top_k_of_parts_kernel(
    p_best,  # [rows, PARTS, k]: keys
    p_sums,  # [rows, PARTS]
    p_tokens,  # [rows, k]
    p_scores,  # [rows, k]
    p_log_sum_exp,  # [rows]
    k,  # run-time, as above
    PARTS: tl.constexpr,  # a readout has one number
    BLOCK: tl.constexpr,  # keys, the shape of the registers
    BLOCK_PARTS: tl.constexpr,  # the shape of the registers of the sums
):
    i_row = tl.program_id(0).to(tl.int64)
    # [BLOCK_PARTS]
    o_part = tl.arange(0, BLOCK_PARTS)
    b_sums = tl.load(p_sums + i_row * PARTS + o_part, mask=o_part < PARTS, other=-INFINITY)
    tl.store(p_log_sum_exp + i_row, _log_sum_exp(b_sums))
    # [BLOCK]
    o_key = tl.arange(0, BLOCK)
    b_keys = tl.load(p_best + i_row * PARTS * k + o_key, mask=o_key < PARTS * k, other=NOTHING)
    for rank in range(k):
        best = tl.max(b_keys, 0)
        tl.store(p_tokens + i_row * k + rank, tokens_of(best))
        tl.store(p_scores + i_row * k + rank, scores_of(best))
        b_keys = tl.where(b_keys == best, NOTHING, b_keys)


@triton.jit
def _log_sum_exp(b_x):
    """Return the log-sum-exp, a float32 number; -inf where all are."""
    largest = tl.max(b_x, 0)
    # inf - inf is NaN.
    shift = tl.where(tl.abs(largest) < INFINITY, largest, 0.0)
    return tl.log(tl.sum(tl.exp(b_x - shift), 0)) + shift
