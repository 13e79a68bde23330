# mypy: allow-untyped-defs, allow-untyped-decorators
"""Bits of a row's ancestors inside Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def shift(bits, by):
    """Return uint64 bits shifted down by `by` places, or up where it is negative."""
    # In two halves, as a shift by 64 or more is undefined.
    down, up = tl.minimum(tl.maximum(by, 0), 126), tl.minimum(tl.maximum(-by, 0), 126)
    bits = bits >> (down // 2).to(tl.uint64) >> (down - down // 2).to(tl.uint64)
    return bits << (up // 2).to(tl.uint64) << (up - up // 2).to(tl.uint64)


@triton.jit
def num_bits(bits):
    """Return the number of bits that are set in each uint32 number, as int32."""
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    # By shifts rather than a product: the sum of all bytes in the lowest.
    bits += bits >> 8
    bits += bits >> 16
    return (bits & 0x3F).to(tl.int32)


@triton.jit
def num_bits_64(bits):
    """Return the number of bits that are set in each uint64 number, as int32."""
    return num_bits(bits.to(tl.uint32)) + num_bits((bits >> 32).to(tl.uint32))
