"""GGUF's block formats as quantised weights: Q8_0, Q4_0, Q4_1, Q4_K and Q6_K (ggml's `ggml-common.h`)."""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.types.quantized_tensor import Nested, QuantizedRows

# Inputs of a block, and of a block of the K formats.
SMALL, LARGE = 32, 256
# Inputs of a Q6_K block that share a scale.
SIXTEEN = 16


def _split(data: Tensor, *sizes: int) -> list[Tensor]:
    """Return the parts of each block, uint8 `[rows, blocks, size]`."""
    return list(torch.split(data.view(len(data), -1, sum(sizes)), list(sizes), -1))


def _floats(part: Tensor) -> Tensor:
    """Return each block's float16, `[rows, blocks]`."""
    return part.contiguous().view(torch.float16).squeeze(-1)


def _halves_in_turn(quarters: Tensor) -> Tensor:
    """Return 4-bit numbers of consecutive inputs packed in bytes, `[rows, inputs / 2]`.

    Args:
        quarters: uint8 `[rows, …, size]`, the lower half of a byte for an input and the upper for that `size` behind.
    """
    numbers = torch.cat([quarters & 15, quarters >> 4], -1).flatten(1)
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def _q8_0(data: Tensor) -> QuantizedRows:
    scale, numbers = _split(data, 2, SMALL)
    numbers = numbers.reshape(len(data), -1).view(torch.int8)
    return QuantizedRows("int8", numbers.shape[1], numbers, SMALL, _floats(scale))


def _q4_0(data: Tensor) -> QuantizedRows:
    scale, numbers = _split(data, 2, SMALL // 2)
    scales = _floats(scale)
    zeros = torch.full_like(scales, 8, dtype=torch.int8)
    return QuantizedRows("uint4", scales.shape[1] * SMALL, _halves_in_turn(numbers), SMALL, scales, zeros)


def _q4_1(data: Tensor) -> QuantizedRows:
    scale, minimum, numbers = _split(data, 2, 2, SMALL // 2)
    scales, minima = _floats(scale), _floats(minimum)
    return QuantizedRows("uint4", scales.shape[1] * SMALL, _halves_in_turn(numbers), SMALL, scales, minima, "minima")


def _q4_k(data: Tensor) -> QuantizedRows:
    scale, minimum, packed, numbers = _split(data, 2, 2, 12, LARGE // 2)
    nested = Nested(_floats(scale), -_floats(minimum))
    # Eight scales and eight minima of 6 bits: those of the first four whole, and the others' bits in two places.
    first, second, third = torch.split(packed, 4, -1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1).flatten(1).view(torch.int8)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1).flatten(1).view(torch.int8)
    halves = _halves_in_turn(numbers.view(len(data), -1, 4, SMALL))
    return QuantizedRows("uint4", 2 * halves.shape[1], halves, SMALL, scales, minima, "minima", nested)


def _q6_k(data: Tensor) -> QuantizedRows:
    low, high, scales, scale = _split(data, LARGE // 2, LARGE // 4, SIXTEEN, 2)
    # Halves of 128 inputs: 64 bytes with the lower bits of four times 32, and 32 bytes with the upper two bits.
    rows, blocks, _ = low.shape
    low, high = low.view(rows, blocks, 2, 1, 2, 32), high.view(rows, blocks, 2, 1, 32)
    lower = torch.cat([low & 15, low >> 4], -3)
    upper = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2).view(rows, blocks, 2, 2, 2, 32)
    numbers = ((lower | upper << 4).view(torch.int8) - 32).flatten(1)
    scales = scales.reshape(len(data), -1).view(torch.int8)
    return QuantizedRows("int8", numbers.shape[1], numbers, SIXTEEN, scales, nested=Nested(_floats(scale), None))


# By ggml's name of a format: from its blocks, uint8 `[rows, bytes]`, to the weight, exactly.
READERS: dict[str, Callable[[Tensor], QuantizedRows]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
