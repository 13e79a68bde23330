# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Functions of the rejection rules' kernels: weights of tokens, what rejections leave of them, coins, draws.

A rounding of float32 is made once, in `w = exp(score - largest)`. All sums, quotients and differences are float64:
whatever is rejected, the output follows w to 2**-50 or so, where float32 would lose what little a rejection leaves.
What is left after any number of rejections is `max(w - share * q, 0)`, and so takes no memory of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton.gumbel_argmax import check_rows
from specdec.kernels.triton.philox import philox_words
from specdec.kernels.triton.score_keys import INFINITY, NOTHING, score_keys
from specdec.kernels.types.types import DraftProbs, NoiseColumns, PackedTrees, Stream

# Tokens that a program reads at once. A row of the batch has one program, and so all that a multiprocessor has.
BLOCK_SIZE = 4096
# A step's coins, and the draw of its last token.
COIN = tl.constexpr(int(Stream.COIN))
RESIDUAL = tl.constexpr(int(Stream.RESIDUAL))
GRID = tl.constexpr(2.0**-53)


def check_walk(scores: Tensor, draft_probs: DraftProbs | None, trees: PackedTrees, noise: NoiseColumns) -> None:
    """Check that the arguments of a walk fit each other.

    Raises:
        ValueError: naming what does not fit.
    """
    rows = trees.starts.numel() - 1
    check_rows(scores, noise, rows)
    count, vocab = scores.shape
    nodes = count - rows
    columns = {"starts": (trees.starts, rows + 1), "tokens": (trees.tokens, nodes), "parents": (trees.parents, nodes)}
    if draft_probs is not None:
        table = draft_probs.table
        columns["draft_probs.rows"] = draft_probs.rows, count
        if table.shape[1:] != (vocab,) or table.dtype != torch.float32 or table.stride(1) != 1:
            raise ValueError(
                f"draft_probs {tuple(table.shape)} {table.dtype}, strides {table.stride()}: not float32 of {vocab} "
                "columns, as there are scores"
            )
    for name, (part, size) in columns.items():
        if part.shape != (size,) or part.dtype != torch.int64 or not part.is_contiguous():
            raise ValueError(
                f"{name} {tuple(part.shape)} {part.dtype}, strides {part.stride()}: not {size} of int64 in one piece, "
                f"as there are {count} scores of {rows} rows"
            )


@triton.jit
def best_key(p_row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the key of a row's largest score; NaN counts as infinity, since neither is valid."""
    # [BLOCK]
    b_best = tl.full([BLOCK], NOTHING, tl.int64)
    for begin in range(0, VOCAB, BLOCK):
        o_token = begin + tl.arange(0, BLOCK)
        b_scores = tl.load(p_row + o_token, mask=o_token < VOCAB, other=-INFINITY).to(tl.float32)
        b_scores = tl.where(b_scores == b_scores, b_scores, INFINITY)
        b_best = tl.maximum(b_best, score_keys(b_scores, o_token))
    return tl.max(b_best, 0)


@triton.jit
def weights(p_row, top, begin, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return `exp(score - top)` of tokens from `begin` on, float64 `[BLOCK]`."""
    o_token = begin + tl.arange(0, BLOCK)
    b_scores = tl.load(p_row + o_token, mask=o_token < VOCAB, other=-INFINITY).to(tl.float32)
    return tl.exp(b_scores - top).to(tl.float64)


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
    p_row, p_q, top, share, begin, b_tokens, m_lost, HAS_DRAFT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the weights that rejections have left of tokens from `begin` on, float64 `[BLOCK]`."""
    b_left = weights(p_row, top, begin, VOCAB, BLOCK)
    if HAS_DRAFT:
        # Where nothing was drawn there is no q to be read.
        if share > 0:
            b_left = rest(b_left, share, draft_probs_of(p_q, begin, VOCAB, BLOCK))
    else:
        b_left = without(b_left, begin, b_tokens, m_lost, BLOCK)
    return b_left


@triton.jit
def draw(
    p_row, p_q, top, share, b_tokens, m_lost, bound,
    HAS_DRAFT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the first token at which the cumulative residual exceeds `bound`, int64; -1 if the residual is empty."""
    # At first the block in which it lies; where rounding puts it behind the last, that.
    seen = tl.full([], 0, tl.float64)
    before = tl.full([], 0, tl.float64)
    chosen = tl.full([], -1, tl.int32)
    begin = tl.full([], 0, tl.int32)
    while (begin < VOCAB) & (seen <= bound):
        b_w = left(p_row, p_q, top, share, begin, b_tokens, m_lost, HAS_DRAFT, VOCAB, BLOCK)
        part = tl.sum(b_w, 0)
        if part > 0:
            chosen, before = begin, seen
        seen += part
        begin += BLOCK
    token = tl.full([], -1, tl.int64)
    if chosen >= 0:
        b_w = left(p_row, p_q, top, share, chosen, b_tokens, m_lost, HAS_DRAFT, VOCAB, BLOCK)
        b_sums = before + tl.cumsum(b_w, 0)
        # [BLOCK]
        o_token = tl.arange(0, BLOCK)
        first = tl.min(tl.where((b_sums > bound) & (b_w > 0), o_token, BLOCK), 0)
        last = tl.max(tl.where(b_w > 0, o_token, 0), 0)
        token = (chosen + tl.minimum(first, last)).to(tl.int64)
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
    """Return number `place` of `verify.noise.uniforms`, float64."""
    w_0, w_1, w_2, w_3 = philox_words(tl.cast(place // 4, tl.uint64), 0, stream, position, seed, sample_index)
    word = tl.where(place % 4 < 2, tl.where(place % 4 == 0, w_0, w_1), tl.where(place % 4 == 2, w_2, w_3))
    return tl.sum((word >> 11).to(tl.float64) * GRID, 0)
