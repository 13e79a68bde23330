"""Copies of numbers from the host to a device, without waiting for it, and back."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# Bytes of a packet's memory on a device, or of a part that is larger.
CHUNK = 1 << 20
# Bytes at whose multiples parts begin, so that kernels are compiled for aligned addresses alone.
ALIGNMENT = 16


def upload(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor on a device, made of nested lists of numbers or of a numpy array.

    A copy from pageable memory would first wait for all pending work of the GPU; pinned memory does not.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    found = torch.tensor(numbers, dtype=dtype)
    # Torch pins none that it makes of a numpy array.
    return torch.empty_like(found, pin_memory=True).copy_(found).to(device, non_blocking=True)


class PacketLayout:
    """Places of tensors in one piece of memory: those that a packet gives to parts of their sizes.

    Attributes:
        size: bytes of all.
    """

    def __init__(self) -> None:
        self._tensors: list[tuple[int, tuple[int, ...], torch.dtype]] = []
        self.size = 0

    def add(self, *shape: int, dtype: torch.dtype = torch.int64) -> None:
        """Add a tensor."""
        self._tensors.append((self.size, shape, dtype))
        self.size += _aligned(math.prod(shape) * dtype.itemsize)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the tensors in memory of `size` bytes, in order."""
        return [
            memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, shape, dtype in self._tensors
        ]


class Packet:
    """Numbers for a device that go there in one copy: each copy is a call of the host, whatever its size.

    On a CPU there is nothing to send.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunks: list[_Chunk] = []
        # On a CPU, the parts since `begin`, with their sizes.
        self._run: list[tuple[Tensor, int]] = []

    @property
    def is_copied(self) -> bool:
        """True if the device has memory of its own, which numbers are copied to."""
        return self.device.type == "cuda"

    def add(self, numbers: Any, dtype: torch.dtype = torch.int64, least: int = 0) -> Tensor:
        """Return a tensor that holds these numbers once the packet is sent; until then it may only be viewed.

        Args:
            numbers: nested lists or a numpy array.
            least: numbers that the part takes at least; zeros fill it, behind the tensor.
        """
        part = torch.tensor(numbers, dtype=dtype)
        size = _aligned(max(part.numel(), least) * part.itemsize)
        if not self.is_copied:
            self._run.append((part, size))
            return part
        return self._chunk_for(size).add(part, size)

    def begin(self, layout: PacketLayout) -> Callable[[], Tensor]:
        """Return what returns the parts that are added next, which lie as in a layout, as bytes.

        Once the packet is sent, one copy of them sets all inputs of a graph.
        """
        if not self.is_copied:
            self._run = run = list[tuple[Tensor, int]]()
            return lambda: _joined(run, layout.size)
        return self._chunk_for(layout.size).reserved(layout.size)

    def send(self) -> None:
        """Send what was added since the last call, before anything reads it."""
        for chunk in self._chunks:
            chunk.send()
        self._chunks.clear()

    def _chunk_for(self, size: int) -> "_Chunk":
        if not self._chunks or self._chunks[-1].room < size:
            self._chunks.append(_Chunk(max(size, CHUNK), self.device))
        return self._chunks[-1]


class _Chunk:
    """Memory of a packet on a device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._parts: list[Tensor] = []
        self._end = 0

    @property
    def room(self) -> int:
        return len(self._memory) - self._end

    def add(self, part: Tensor, size: int) -> Tensor:
        found = self._memory[self._end : self._end + part.numel() * part.itemsize].view(part.dtype).view(part.shape)
        self._parts.append(_padded(part, size))
        self._end += size
        return found

    def reserved(self, size: int) -> Callable[[], Tensor]:
        found = self._memory[self._end : self._end + size]
        return lambda: found

    def send(self) -> None:
        if not self._parts:
            return
        pinned = torch.empty(self._end, dtype=torch.uint8, pin_memory=True)
        torch.cat(self._parts, out=pinned)
        self._memory[: self._end].copy_(pinned, non_blocking=True)


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def _padded(part: Tensor, size: int) -> Tensor:
    """Return a part as bytes, with zeros behind it."""
    numbers = part.flatten().view(torch.uint8)
    return pad(numbers, (0, size - len(numbers)))


def _joined(parts: Sequence[tuple[Tensor, int]], size: int) -> Tensor:
    """Return the first `size` bytes of parts."""
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(_padded(*part) for part in parts)])[:size]


def read_together(parts: Sequence[Tensor]) -> list[list[int]]:
    """Return the numbers of each tensor, in one transfer: the one time in a step that the host waits for a device."""
    flat = [part.flatten() for part in parts]
    numbers: list[int] = (torch.cat(flat) if len(flat) > 1 else flat[0]).tolist()
    ends = accumulate((part.numel() for part in parts), initial=0)
    return [numbers[start:end] for start, end in pairwise(ends)]
