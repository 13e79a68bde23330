# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Counter-based random numbers in registers: the words of numpy's Philox 4x64-10, and Gumbel noise made of them."""

import triton
import triton.language as tl

# Multipliers and key increments of Salmon et al. 2011.
M_0 = tl.constexpr(0xD2E7470EE14C6C93)
M_1 = tl.constexpr(0xCA5A826395121157)
W_0 = tl.constexpr(0x9E3779B97F4A7C15)
W_1 = tl.constexpr(0xBB67AE8584CAA73B)
ROUNDS = tl.constexpr(10)
# One counter gives four words of 64 bits, of which a token takes one half.
TOKENS = tl.constexpr(8)

GRID = tl.constexpr(2.0**-32)
BELOW_ONE = tl.constexpr(1 - 2.0**-24)


@triton.jit
def philox_words(block, lane, stream, position, seed, sample_index):
    """Return words `4 * block .. 4 * block + 3` of numpy's Philox with counter [0, lane, stream, position].

    The key is [seed, sample index].

    Args:
        block: uint64 tensor; the others numbers from 0 to 2**63 - 1, scalar or of its shape.

    Returns:
        Four uint64 tensors of its shape, in the order of `random_raw`.
    """
    # Numpy counts up before it draws.
    c_0 = block + tl.full([1], 1, tl.uint64)
    c_1, c_2, c_3 = tl.cast(lane, tl.uint64), tl.cast(stream, tl.uint64), tl.cast(position, tl.uint64)
    k_0, k_1 = tl.cast(seed, tl.uint64), tl.cast(sample_index, tl.uint64)
    for _ in tl.static_range(ROUNDS):
        high_0, high_1 = tl.umulhi(c_0, M_0), tl.umulhi(c_2, M_1)
        low_0, low_1 = c_0 * M_0, c_2 * M_1
        c_0, c_1 = high_1 ^ c_1 ^ k_0, low_1
        c_2, c_3 = high_0 ^ c_3 ^ k_1, low_0
        k_0 += W_0
        k_1 += W_1
    return c_0, c_1, c_2, c_3


@triton.jit
def token_words(start, seed, sample_index, position, stream, lane, SIZE: tl.constexpr):
    """Return the words of tokens `start .. start + SIZE - 1`, uint32 `[SIZE]`, as numpy views the 64-bit ones.

    Args:
        start: a multiple of 8.
        seed, sample_index, position, stream, lane: scalar numbers from 0 to 2**63 - 1.
        SIZE: constexpr, the shape of the result: a power of two, at least 8.
    """
    block = (start // TOKENS + tl.arange(0, SIZE // TOKENS)).to(tl.uint64)
    w_0, w_1, w_2, w_3 = philox_words(block, lane, stream, position, seed, sample_index)
    # [SIZE / 8, 2, 2]: word 2 a + b at [:, a, b].
    words = tl.join(tl.join(w_0, w_2), tl.join(w_1, w_3))
    # [SIZE / 8, 2, 2, 2]: its low half first, as on every little-endian machine.
    halves = tl.join(words.to(tl.uint32), (words >> 32).to(tl.uint32))
    return tl.reshape(halves, [SIZE])


@triton.jit
def words_of(tokens, seed, sample_index, position, stream, lane):
    """Return each token's word, uint32, as `token_words` has it, for tokens in any order.

    Args:
        tokens: int64 tensor of numbers from 0 on; the others as there.
    """
    w_0, w_1, w_2, w_3 = philox_words((tokens // TOKENS).to(tl.uint64), lane, stream, position, seed, sample_index)
    place = tokens % TOKENS
    words = tl.where(place < 4, tl.where(place < 2, w_0, w_1), tl.where(place < 6, w_2, w_3))
    # The low half first, as above.
    return tl.where(place % 2 == 0, words, words >> 32).to(tl.uint32)


@triton.jit
def gumbel(words):
    """Return standard Gumbel variates of uint32 words, float32: `-log(-log1p(-v))` with v = (word + 0.5) / 2**32.

    There is no `log1p` that both the compiler and the interpreter know. With u = 1 - v rounded, and e what the
    rounding has lost, log(1 - v) = log(u) + log(1 + e / u) = log(u) + e + e v to within a rounding: e is exact, and
    at most 2**-25.
    """
    v = tl.minimum((words.to(tl.float32) + 0.5) * GRID, BELOW_ONE)
    u = 1.0 - v
    lost = (1.0 - u) - v
    return -tl.log(-(tl.log(u) + (lost + lost * v)))
