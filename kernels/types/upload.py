"""Copies of numbers from the host to a device, without waiting for it, and back."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


def upload(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor on a device, made of nested lists of numbers or of a numpy array.

    A copy from pageable memory would first wait for all pending work of the GPU; pinned memory does not.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def read_together(parts: Sequence[Tensor]) -> list[list[int]]:
    """Return the numbers of each tensor, in one transfer: the one time in a step that the host waits for a device."""
    numbers: list[int] = torch.cat([part.flatten() for part in parts]).tolist()
    ends = accumulate((part.numel() for part in parts), initial=0)
    return [numbers[start:end] for start, end in pairwise(ends)]
