"""Arithmetic of whole numbers. Pure Python."""


def ceil_div(a: int, b: int) -> int:
    """Return `a / b` rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least `n`, for `n` from 1 on."""
    return 1 << (n - 1).bit_length()
