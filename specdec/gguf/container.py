"""The container of a GGUF file: its keys with their values, and its tensors, which stay in the mapped file."""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.unreadable_files import damage

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Bytes to which the data of tensors are aligned, unless the file says so itself.
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"
# Formats of numbers by the type of a value.
NUMBERS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
# More than any file has; what is larger is no count.
MOST = 1 << 32


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        kind: ggml's name of its type.
        shape: sizes, the rows before their numbers.
        data: its bytes in the mapped file, uint8.
    """

    kind: str
    shape: tuple[int, ...]
    data: Tensor

    def row_bytes(self) -> Tensor:
        """Return the bytes of each row, uint8 `[…, bytes]`."""
        return self.data.view(*self.shape[:-1], -1)


def read_container(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Read the keys of a file, and where its tensors are. Arrays of numbers are numpy's, those of strings lists.

    Raises:
        CheckpointError: it is no GGUF file, of another version or byte order, or cut off.
    """
    with path.open("rb") as file:
        if path.stat().st_size < len(MAGIC) or file.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{path}: {damage(path, 'it does not begin with GGUF')}")
        # A private mapping: its pages are those of the file, and nobody else sees what is written to it.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        return _Cursor(memory).container()
    except _UnreadableError as error:
        raise CheckpointError(f"{path}: not a GGUF file that can be read: {error}") from None
    except (struct.error, IndexError):
        raise CheckpointError(
            f"{path}: not a GGUF file that can be read: it is cut off at {len(memory)} bytes, inside its keys; "
            "download it again"
        ) from None


class _UnreadableError(Exception):
    """Reason why a file cannot be read."""


class _Cursor:
    """A place in a mapped file, from which its parts are read in turn."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._place = len(MAGIC)

    def container(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version = self._number("<I")
        if version not in VERSIONS:
            kind = "of big-endian machines" if version & 0xFFFF == 0 else f"of version {version}"
            raise _UnreadableError(f"it is {kind}; versions {VERSIONS[0]} and {VERSIONS[1]} can be read")
        tensors, keys = self._count(), self._count()
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in values:
                raise _UnreadableError(f"it has the key {key} twice")
            values[key] = self._value(self._number("<I"))
        return values, self._tensors(tensors, values.get(ALIGNMENT_KEY, ALIGNMENT))

    def _number(self, form: str) -> Any:
        (found,) = struct.unpack_from(form, self._memory, self._place)
        self._place += struct.calcsize(form)
        return found

    def _count(self) -> int:
        found: int = self._number("<Q")
        if found > MOST:
            raise _UnreadableError(f"it counts {found} of something")
        return found

    def _string(self) -> str:
        size = self._count()
        end = self._place + size
        if end > len(self._memory):
            raise IndexError
        found = self._memory[self._place : end].decode("utf-8", errors="replace")
        self._place = end
        return found

    def _strings(self, count: int) -> list[str]:
        """Return an array of strings. A vocabulary has hundreds of thousands, so this is the plain loop."""
        memory, place, length = self._memory, self._place, struct.Struct("<Q")
        found = []
        for _ in range(count):
            (size,) = length.unpack_from(memory, place)
            place += length.size + size
            found.append(memory[place - size : place].decode("utf-8", errors="replace"))
        if place > len(memory):
            raise IndexError
        self._place = place
        return found

    def _value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise _UnreadableError(f"it has a value of the unknown type {kind}")
        item, count = self._number("<I"), self._count()
        if item == STRING:
            return self._strings(count)
        if item not in NUMBERS:
            return [self._value(item) for _ in range(count)]
        dtype = np.dtype(NUMBERS[item])
        if self._place + count * dtype.itemsize > len(self._memory):
            raise IndexError
        found = np.frombuffer(self._memory, dtype, count, self._place)
        self._place += count * dtype.itemsize
        return found

    def _tensors(self, count: int, alignment: Any) -> dict[str, GgufTensor]:
        if type(alignment) is not int or alignment < 1:
            raise _UnreadableError(f"{ALIGNMENT_KEY} is {alignment!r}")
        told = []
        for _ in range(count):
            name, dims = self._string(), self._number("<I")
            shape = tuple(self._count() for _ in range(dims))[::-1]
            told.append((name, shape, self._number("<I"), self._number("<Q")))
        start = -(-self._place // alignment) * alignment
        sizes = _type_sizes()
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in told:
            if kind not in sizes:
                raise _UnreadableError(f"{name} has the unknown type {kind}")
            kind_name, size_of = sizes[kind]
            size, begin = size_of(shape), start + offset
            if size is None or name in found:
                raise _UnreadableError(
                    f"{name} of shape {list(shape)} is no tensor of type {kind_name}, or is there twice"
                )
            if begin + size > len(self._memory):
                raise _UnreadableError(
                    f"it is cut off at {len(self._memory)} bytes, before the end of {name} at {begin + size}; "
                    "download it again"
                )
            data = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=begin) if size else _NOTHING
            found[name] = GgufTensor(kind_name, shape, data)
        return found


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _type_sizes() -> dict[int, tuple[str, Callable[[tuple[int, ...]], int | None]]]:
    """Return ggml's types: their names, and a function from a shape to bytes, None for rows of no whole blocks."""
    from gguf.constants import GGML_QUANT_SIZES

    def bytes_of(block: int, size: int) -> Callable[[tuple[int, ...]], int | None]:
        return lambda shape: None if not shape or shape[-1] % block else math.prod(shape) // block * size

    return {int(kind): (kind.name, bytes_of(*sizes)) for kind, sizes in GGML_QUANT_SIZES.items()}
