"""Memory for weights in pages of 2 MB."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.types.integers import ceil_div

PAGE = 2 << 20
# Bytes of a piece. A tensor of more than a quarter of that has a piece of its own.
PIECE = 32 << 20
# Bytes to which the beginning of each tensor is aligned.
ALIGNMENT = 4096


class HugePages:
    """Tensors side by side in memory for which Linux is asked to use pages of 2 MB (transparent huge pages).

    A product reads the whole of a weight, and for each page the processor must look up where it lies. In pages of 4 kB
    it cannot remember as many as a small model has. On other systems the tensors lie side by side in ordinary pages.
    A piece of memory is returned when the last tensor in it is freed.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor on the CPU."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(*shape, dtype=dtype)
        if size > PIECE // 4:
            return _piece(size)[:size].view(dtype).view(*shape)
        if self._used + size > len(self._piece):
            self._piece, self._used = _piece(PIECE), 0
        found = self._piece[self._used : self._used + size]
        self._used += ceil_div(size, ALIGNMENT) * ALIGNMENT
        return found.view(dtype).view(*shape)


def _piece(size: int) -> Tensor:
    """Return at least `size` bytes that begin with a page. Those that are never written take no memory."""
    size = ceil_div(size, PAGE) * PAGE
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without such pages refuses.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor holds the mapping.
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    return whole[start : start + size]
