"""Caches whose entries tests move, and the sizes of the kernels that move them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.kernels.kernel_checks import BITS, DEVICE


@contextmanager
def tiles(moves: int, chunk: int) -> Iterator[None]:
    """Set how many moves a program reads at once, and how many numbers of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.kernels.triton.kv_copy.MOVES_AT_ONCE", moves)
        patch.setattr("specdec.kernels.triton.kv_copy.CHUNK_SIZE", chunk)
        yield


def cache(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Every number is different, so that no move can pass for another; some are NaN. Bytes are what they can be."""
    numbers = torch.randperm(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(seed))
    # 16 bits hold no more; they count from the lowest NaN pattern on.
    return (numbers - 128).to(BITS[dtype]).view(dtype).view(shape).to(DEVICE)


def bits(kv: Tensor) -> Tensor:
    return kv.view(BITS[kv.dtype])
