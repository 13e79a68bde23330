# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Argmax of scores, with the position's own noise in sampled rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton.philox import gumbel, token_words
from specdec.kernels.triton.score_keys import INFINITY, NOTHING, score_keys, scores_of, tokens_of
from specdec.kernels.types.types import DTYPES, NoiseColumns

# Tokens of a program: a Philox counter, eight tokens, for each thread of four warps.
BLOCK_SIZE = 1024


def gumbel_argmax(scores: Tensor, noise: NoiseColumns) -> Tensor:
    """Return `argmax_v scores[v] + G(seed, sample index, position, v)`, lowest id on ties: a sample of softmax(scores).

    Args:
        scores: `[rows, vocab]`, float32, bfloat16 or float16; processed, not normalised; each row in one piece.
        noise: of each row.

    Returns:
        int64 `[rows]`; -1 where the largest is no finite number, or one of them is NaN.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    best = best_of_parts(scores, noise)
    rows, parts = best.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        best_of_parts_kernel[(rows,)](best, tokens, PARTS=parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return tokens


def best_of_parts(scores: Tensor, noise: NoiseColumns) -> Tensor:
    """Return the largest of each part of `BLOCK_SIZE` scores plus noise, with its token, as a key.

    Args:
        scores, noise: those of `gumbel_argmax`.

    Returns:
        int64 `[rows, parts]`; `best_token` joins them.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    check_rows(scores, noise)
    rows, vocab = scores.shape
    parts = triton.cdiv(vocab, BLOCK_SIZE)
    best = torch.empty(rows, parts, dtype=torch.int64, device=scores.device)
    if rows:
        best_of_part_kernel[(rows, parts)](
            scores, *noise, best, scores.stride(0), VOCAB=vocab, BLOCK=BLOCK_SIZE, num_warps=4
        )
    return best


def check_rows(scores: Tensor, noise: NoiseColumns, rows: int | None = None) -> None:
    """Check that scores and noise fit each other.

    Args:
        rows: rows of noise; None for as many as there are of scores.

    Raises:
        ValueError: they do not.
    """
    if scores.ndim != 2 or not scores.shape[1] or scores.stride(1) != 1 or scores.dtype not in DTYPES:
        raise ValueError(
            f"scores {tuple(scores.shape)} {scores.dtype}, strides {scores.stride()}: not [rows, vocab] of {DTYPES}"
        )
    shape = (len(scores) if rows is None else rows,)
    for name, part in noise._asdict().items():
        kind = "bool" if name == "sampled" else "int64"
        if part.shape != shape or part.dtype != getattr(torch, kind) or not part.is_contiguous():
            raise ValueError(f"{name} {tuple(part.shape)} {part.dtype}: not {kind} {shape}, as there are rows")


@triton.jit
def best_of_part_kernel(
    p_scores,  # [rows, VOCAB]
    p_seeds,  # [rows]
    p_sample_indices,  # [rows]
    p_positions,  # [rows]
    p_sampled,  # [rows]
    p_best,  # [rows, parts]: keys
    stride,  # run-time: scores may be columns of a wider tensor
    VOCAB: tl.constexpr,  # a model has one
    BLOCK: tl.constexpr,  # the shape of the registers
):
    i_row = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1)
    # [BLOCK]
    o_token = i_part * BLOCK + tl.arange(0, BLOCK)
    b_scores = tl.load(p_scores + i_row * stride + o_token, mask=o_token < VOCAB, other=-INFINITY).to(tl.float32)
    # One answer for the whole program: a greedy row computes no noise.
    if tl.load(p_sampled + i_row):
        seed = tl.load(p_seeds + i_row)
        sample_index = tl.load(p_sample_indices + i_row)
        position = tl.load(p_positions + i_row)
        b_scores += gumbel(token_words(i_part * BLOCK, seed, sample_index, position, 0, 0, BLOCK))
    # NaN as infinity: neither is an answer, and no finite score may hide either.
    b_scores = tl.where(b_scores == b_scores, b_scores, INFINITY)
    # Padding beyond the vocabulary is -inf with the highest ids, so it ranks last.
    tl.store(p_best + i_row * tl.num_programs(1) + i_part, tl.max(score_keys(b_scores, o_token), 0))


@triton.jit
def best_of_parts_kernel(
    p_best,  # [rows, PARTS]: keys
    p_tokens,  # [rows]
    PARTS: tl.constexpr,  # a model has one
    BLOCK: tl.constexpr,  # the shape of the registers
):
    i_row = tl.program_id(0).to(tl.int64)
    tl.store(p_tokens + i_row, best_token(p_best + i_row * PARTS, PARTS, BLOCK))


@triton.jit
def best_token(p_best, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the token of the largest of a row's keys, `[PARTS]`; -1 where its score is not finite."""
    # [BLOCK]
    o_part = tl.arange(0, BLOCK)
    best = tl.max(tl.load(p_best + o_part, mask=o_part < PARTS, other=NOTHING), 0)
    return tl.where(tl.abs(scores_of(best)) < INFINITY, tokens_of(best), -1)
