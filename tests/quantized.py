"""The numbers that weights in 8 bits stand for, written without the package."""

import torch
from torch import Tensor

# Inputs that share a scale.
GROUP = 32


def dequantized(weight: Tensor) -> Tensor:
    """Return a weight `[columns, inputs]` as 8 bits keep it, float64.

    Each group's scale is its largest magnitude / 127 as a bfloat16, and a number is the nearest multiple of it.
    """
    parts = []
    for group in weight.double().split(GROUP, dim=1):
        scale = (group.abs().amax(1, keepdim=True).float() / 127).bfloat16().double()
        parts.append(torch.where(scale > 0, (group / scale).round().clamp(-127, 127) * scale, 0.0))
    return torch.cat(parts, 1)
