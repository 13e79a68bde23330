"""Copies of numbers from the host to a device, without waiting for the device."""

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
