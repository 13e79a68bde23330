"""Copies of numbers from the host to a device, without waiting for it, and back."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Bytes of a packet's memory on a device, or of a part that is larger.
CHUNK = 1 << 20
# Bytes at whose multiples parts begin, so that kernels are compiled for aligned addresses alone.
ALIGNMENT = 16
# The same as int64.
NUMBERS_ALIGNED = ALIGNMENT // 8
# Of the numbers that a packet takes.
NUMPY_DTYPES = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


def upload(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor on a device, made of nested lists of numbers or of a numpy array.

    A copy from pageable memory would first wait for all pending work of the GPU; pinned memory does not.

    Args:
        dtype: one of `NUMPY_DTYPES`.
    """
    part: NDArray[Any] = np.ascontiguousarray(numbers, NUMPY_DTYPES[dtype])
    size = _aligned(part.nbytes)
    chunk = _Chunk(size, device)
    found = chunk.add(part, dtype, size)
    chunk.send()
    return found


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

    They are written to pinned memory as they are added. On a CPU that is the memory they stay in, and nothing is sent.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunks: list[_Chunk] = []
        self._attached: list[Callable[[Packet], Callable[[], None]]] = []

    @property
    def is_copied(self) -> bool:
        """True if the device has memory of its own, which numbers are copied to."""
        return self.device.type == "cuda"

    def add(self, numbers: Any, dtype: torch.dtype = torch.int64, least: int = 0) -> Tensor:
        """Return a tensor that holds these numbers once the packet is sent; until then it may only be viewed.

        Args:
            numbers: nested lists or a numpy array.
            dtype: one of `NUMPY_DTYPES`.
            least: numbers that the part takes at least; zeros fill it, behind the tensor.
        """
        part: NDArray[Any] = np.ascontiguousarray(numbers, NUMPY_DTYPES[dtype])
        size = _aligned(max(part.nbytes, least * dtype.itemsize))
        return self._chunk_for(size).add(part, dtype, size)

    def add_lists(self, *lists: Sequence[int]) -> list[Tensor]:
        """Return an int64 tensor of each list; see `add`. They lie as if added one by one.

        A step has many short lists, and to add one takes the host longer than to write its numbers.
        """
        numbers: list[int] = []
        sizes: list[int] = []
        for one in lists:
            padding = -len(one) % NUMBERS_ALIGNED
            numbers += one
            numbers += [0] * padding
            sizes += len(one), padding
        return [*self.add(numbers).split_with_sizes(sizes)[::2]]

    def begin(self, layout: PacketLayout) -> Tensor:
        """Return the bytes of the parts that are added next, which lie as in a layout.

        Once the packet is sent, one copy of them sets all inputs of a graph.
        """
        return self._chunk_for(layout.size).following(layout.size)

    def attach(self, changes: "Callable[[Packet], Callable[[], None]]") -> None:
        """Have memory of the device changed with this packet.

        Args:
            changes: called when the packet is sent; adds its numbers, and returns what makes the changes afterwards.
        """
        if changes not in self._attached:
            self._attached.append(changes)

    def send(self) -> None:
        """Send what was added since the last call, before anything reads it."""
        make = [changes(self) for changes in self._attached]
        self._attached.clear()
        for chunk in self._chunks:
            chunk.send()
        self._chunks.clear()
        for one in make:
            one()

    def _chunk_for(self, size: int) -> "_Chunk":
        if not self._chunks or self._chunks[-1].room < size:
            self._chunks.append(_Chunk(max(size, CHUNK), self.device))
        return self._chunks[-1]


class _Chunk:
    """Memory of a packet, on the host and on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_copied = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=is_copied)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device) if is_copied else self._host
        self._bytes = self._host.numpy()
        # The memory as numbers of each dtype.
        self._typed: dict[torch.dtype, Tensor] = {}
        self._end, self.room = 0, size

    def add(self, part: NDArray[Any], dtype: torch.dtype, size: int) -> Tensor:
        start, own = self._end, part.nbytes
        self._end += size
        self.room -= size
        self._bytes[start : start + own] = part.reshape(-1).view(np.uint8)
        if own < size:
            self._bytes[start + own : self._end] = 0
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._memory.view(dtype)
        first, shape = start // dtype.itemsize, part.shape
        if len(shape) == 1:
            return typed[first : first + shape[0]]
        return typed[first : first + part.size].view(shape)

    def following(self, size: int) -> Tensor:
        return self._memory[self._end : self._end + size]

    def send(self) -> None:
        if self._end and self._memory is not self._host:
            self._memory[: self._end].copy_(self._host[: self._end], non_blocking=True)


def copy_parts(parts: Sequence[Tensor], target: Tensor) -> None:
    """Copy parts of a packet, as bytes, one behind the other to a target: at once where they lie so in the packet."""
    first, size = parts[0], target.shape[0]
    ends = accumulate([part.shape[0] for part in parts[:-1]], initial=first.data_ptr())
    # A part that did not fit there is in memory of its own, which may lie behind by chance.
    is_whole = first.storage_offset() + size <= first.untyped_storage().nbytes()
    if is_whole and all(part.data_ptr() == end for part, end in zip(parts, ends, strict=True)):
        target.copy_(first.as_strided((size,), (1,)))
    else:
        torch.cat([*parts], out=target)


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


class Download:
    """Numbers of tensors on their way to the host, in one transfer.

    The host may ask the device for more before it reads them, and then waits for what was asked before alone.

    Args:
        parts: int64, all of one device.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        flat = [part.flatten() for part in parts]
        self._ends = list(accumulate((part.numel() for part in parts), initial=0))
        self._numbers, self._there = torch.cat(flat) if len(flat) > 1 else flat[0], None
        if self._numbers.device.type == "cuda":
            given = self._numbers
            self._numbers = torch.empty(len(given), dtype=given.dtype, pin_memory=True)
            self._numbers.copy_(given, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record()

    def read(self) -> list[list[int]]:
        """Return the numbers of each tensor; the one time in a step that the host waits for a device."""
        if self._there is not None:
            self._there.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return [numbers[start:end] for start, end in pairwise(self._ends)]
