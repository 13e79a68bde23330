# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Codes of quantised keys and values in Triton: from numbers to bytes and back, on any GPU.

8-bit floats are made and read by their bits, since only some GPUs have instructions for them.
"""

import torch
import triton
import triton.language as tl

# Kinds of codes, as kernels name them; 0 stands for none.
CODES = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
# What codes as `decode` returns them are in units of.
CODE_UNITS = {torch.float8_e4m3fn: 256.0}


@triton.jit
def encode(
    b_x,  # float32, scaled, and not NaN
    CODES: tl.constexpr,
    LARGEST: tl.constexpr,  # the number of the largest code
):
    """Return the codes of numbers as uint8: the nearest, ties to even, at most the largest."""
    b_x = tl.minimum(tl.maximum(b_x, -LARGEST), LARGEST)
    if CODES == 1:
        # The sum's last bits are the whole number.
        return (b_x + 12582912.0).to(tl.uint32, bitcast=True).to(tl.uint8)
    DROP: tl.constexpr = 20 if CODES == 2 else 21
    BIAS: tl.constexpr = 120 * 8 if CODES == 2 else 112 * 4
    # Bits of 2^14 and 2^7: a sum's last bits are the steps of subnormal codes.
    STEP: tl.constexpr = 0x46800000 if CODES == 2 else 0x43000000
    # Bits of 2^-6 and 2^-14.
    LEAST: tl.constexpr = 0x3C800000 if CODES == 2 else 0x38800000
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    b_step = tl.full(b_x.shape, STEP, tl.uint32)
    b_small = b_size.to(tl.float32, bitcast=True) + b_step.to(tl.float32, bitcast=True)
    b_small = b_small.to(tl.uint32, bitcast=True) - b_step
    b_normal = ((b_size + ((1 << (DROP - 1)) - 1) + ((b_size >> DROP) & 1)) >> DROP) - BIAS
    b_code = tl.where(b_size < LEAST, b_small, b_normal) | ((b_bits >> 24) & 0x80)
    return b_code.to(tl.uint8)


@triton.jit
def decode(
    b_codes,  # uint8
    CODES: tl.constexpr,
    DTYPE: tl.constexpr,  # of the products; it holds all codes exactly
):
    """Return the numbers of codes in units of `CODE_UNITS`, without their scale."""
    if CODES == 1:
        return b_codes.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)
    # As float16; its exponents have a bit more, and another bias, than those of 4 bits.
    b_half = b_codes.to(tl.uint16)
    b_half = ((b_half & 0x80) << 8) | ((b_half & 0x7F) << 7) if CODES == 2 else b_half << 8
    return b_half.to(tl.float16, bitcast=True).to(DTYPE)
