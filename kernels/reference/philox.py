"""Philox words and Gumbel noise in plain torch: the reference of the Triton functions."""

import torch
from torch import Tensor

from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.types import NoiseKey, Stream

# Philox 4x64-10: multipliers and key increments of Salmon et al. 2011.
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
INCREMENTS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
HALF = 0xFFFFFFFF


def philox_words(
    seeds: Tensor, sample_indices: Tensor, positions: Tensor, count: int, stream: int = 0, lane: int = 0
) -> Tensor:
    """Return the first words of numpy's Philox with counter [0, lane, stream, position] and key [seed, sample index].

    Args:
        seeds, sample_indices, positions: int64 `[rows]`.

    Returns:
        int64 `[rows, count]`, the bits of the uint64 words.
    """
    rows, blocks = len(seeds), ceil_div(count, 4)
    # Numpy counts up before it draws.
    counter = [torch.arange(1, blocks + 1, device=seeds.device).expand(rows, -1)]
    counter += [torch.full_like(counter[0], word) for word in (lane, stream)]
    counter.append(positions[:, None].expand(-1, blocks))
    key = [seeds[:, None], sample_indices[:, None]]
    for _ in range(ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _product(counter[2 * i], multiplier) for i, multiplier in enumerate(MULTIPLIERS)
        )
        counter = [high_1 ^ counter[1] ^ key[0], low_1, high_0 ^ counter[3] ^ key[1], low_0]
        key = [part + _signed(increment) for part, increment in zip(key, INCREMENTS, strict=True)]
    return torch.stack(counter, -1).flatten(1)[:, :count]


def _product(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return both halves of the 128-bit product, from products of 32-bit halves; int64 wraps around as uint64 does."""
    low, high = multiplier & HALF, multiplier >> 32
    x_low, x_high = x & HALF, _upper(x)
    low_low, low_high, high_low = x_low * low, x_low * high, x_high * low
    middle = _upper(low_low) + (low_high & HALF) + (high_low & HALF)
    return x_high * high + _upper(low_high) + _upper(high_low) + _upper(middle), x * _signed(multiplier)


def _upper(x: Tensor) -> Tensor:
    """Return the upper 32 bits as an unsigned number."""
    return (x >> 32) & HALF


def _signed(word: int) -> int:
    """Return the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word


def gumbel_noise(
    seeds: Tensor, sample_indices: Tensor, positions: Tensor, size: int, stream: int = 0, lane: int = 0
) -> Tensor:
    """Return standard Gumbel variates as `reference.noise.gumbel` makes them, float32 `[rows, size]`.

    Args:
        seeds, sample_indices, positions: int64 `[rows]`.
    """
    words = philox_words(seeds, sample_indices, positions, (size + 1) // 2, stream, lane)
    halves = torch.stack([words & HALF, _upper(words)], -1).flatten(1)[:, :size]
    v = halves.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def uniforms(key: NoiseKey, count: int, stream: Stream) -> list[float]:
    """Return uniform variates in [0, 1) as `reference.noise.uniforms` makes them."""
    seeds, indices, positions = torch.tensor(key)[:, None].unbind()
    words = philox_words(seeds, indices, positions, count, stream)
    return [((word & (1 << 64) - 1) >> 11) * 2.0**-53 for word in words[0].tolist()]
