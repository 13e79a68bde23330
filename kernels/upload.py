"""Numbers from the host to a device, without waiting for what the device is doing."""

from typing import Any

import torch
from torch import Tensor


def upload(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of nested lists of numbers, or of a numpy array.

    From pageable memory a copy would first wait for all that the GPU has been asked.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
