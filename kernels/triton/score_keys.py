# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""A score and its token as one integer, so that one comparison settles both order and ties."""

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
# Below the key of every score: no score is left.
NOTHING = tl.constexpr(-(2**63))
LOW_HALF = tl.constexpr(0xFFFFFFFF)


@triton.jit
def score_keys(scores, tokens):
    """Return keys, int64: larger for the larger score, and for the lower token among equal scores.

    Args:
        scores: float32, no NaN.
        tokens: integers from 0 to 2**32 - 1, of the same shape.
    """
    return (score_bits(scores).to(tl.int64) << 32) | (tokens.to(tl.int64) ^ LOW_HALF)


@triton.jit
def score_bits(scores):
    """Return int32 that compare as the scores do."""
    # 0 for -0, which is as large.
    return ordered(tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True))


@triton.jit
def scores_of(keys):
    """Return the scores of keys, float32."""
    return ordered((keys >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def tokens_of(keys):
    """Return the tokens of keys, int64."""
    return (keys & LOW_HALF) ^ LOW_HALF


@triton.jit
def ordered(bits):
    """Return a float's bits as an integer that compares as the float does; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
