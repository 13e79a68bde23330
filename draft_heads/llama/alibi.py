"""Slopes of ALiBi, attention with linear biases (Press et al. 2021, 2108.12409)."""


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head, by which its scores fall with every position that a key lies farther back.

    Of n heads, a power of two, head i from 1 on has 2^(-8 i / n). Other numbers take those of the next lower power of
    two, and behind them every other one of twice as many heads, as the authors' code does.

    Args:
        heads: of the whole layer; a rank's are a part of theirs.
    """
    power = 1 << (heads.bit_length() - 1)
    return tuple(2 ** (-8 * i / power) for i in range(1, power + 1)) + tuple(
        2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)
    )
