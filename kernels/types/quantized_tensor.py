"""Weights as quantised checkpoints store them: numbers of few bits, with scales for groups of a row's inputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

NumberKind = Literal["int8", "uint4", "fp8"]
OffsetKind = Literal["minima", "zeros"]
# Inputs that share a float16 of which nested scales are multiples.
NESTED_INPUTS = 256


class Nested(NamedTuple):
    """Factors of scales that are whole numbers themselves.

    Attributes:
        scales: float16 `[rows, inputs / 256]`.
        minima: likewise, already with their sign; None for none.
    """

    scales: Tensor
    minima: Tensor | None


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a quantised weight `[rows, inputs]`: `scale * number + minimum`, or `scale * (number - zero)`.

    Attributes:
        kind: of the numbers.
        inputs: of a row.
        numbers: int8 `[rows, inputs]`; of fp8 float8_e4m3fn; of uint4 uint8 `[rows, inputs / 2]`, the even input in the
            lower half of a byte.
        group: inputs of a row that share a scale; the last group may be smaller.
        scales: `[rows, groups]`, float32, bfloat16 or float16; int8 if `nested`.
        offsets: minima in the scales' dtype, or zeros as int8, `[rows, groups]`; None for none.
        offset_kind: which of them.
        nested: factors of scales and minima, or None.
    """

    kind: NumberKind
    inputs: int
    numbers: Tensor
    group: int
    scales: Tensor
    offsets: Tensor | None = None
    offset_kind: OffsetKind = "zeros"
    nested: Nested | None = None

    def __len__(self) -> int:
        return len(self.scales)

    @property
    def device(self) -> torch.device:
        return self.scales.device

    @property
    def minima(self) -> Tensor | None:
        """The offsets, if they are minima."""
        return self.offsets if self.offset_kind == "minima" else None

    def map(self, change: Callable[[Tensor], Tensor]) -> "QuantizedRows":
        """Return the rows with each tensor changed alike."""
        nested = self.nested
        if nested is not None:
            nested = Nested(change(nested.scales), None if nested.minima is None else change(nested.minima))
        offsets = None if self.offsets is None else change(self.offsets)
        return replace(self, numbers=change(self.numbers), scales=change(self.scales), offsets=offsets, nested=nested)

    def unpacked_numbers(self) -> Tensor:
        """Return the numbers with one element each, `[rows, inputs]`."""
        if self.kind != "uint4":
            return self.numbers
        return torch.stack([self.numbers & 15, self.numbers >> 4], -1).flatten(1)[:, : self.inputs]

    def numbers_between(self, start: int, stop: int) -> Tensor:
        """Return the stored numbers of inputs `start .. stop - 1`; `start` is even."""
        size = 2 if self.kind == "uint4" else 1
        return self.numbers[:, start // size : math.ceil(stop / size)]

    def flat(self) -> "QuantizedRows":
        """Return the same rows with scales and minima in float32, which holds nested ones exactly."""
        if self.nested is None:
            return self

        def scaled(factors: Tensor, numbers: Tensor) -> Tensor:
            groups = torch.arange(numbers.shape[1], device=numbers.device) * self.group // NESTED_INPUTS
            return factors.float()[:, groups] * numbers.float()

        minima = self.minima
        if minima is not None and self.nested.minima is not None:
            minima = scaled(self.nested.minima, minima)
        return replace(
            self, scales=scaled(self.nested.scales, self.scales), offsets=minima, offset_kind="minima", nested=None
        )

    def dequantized(self) -> Tensor:
        """Return the weights, float32 `[rows, inputs]`, in which transformers and llama.cpp compute them too."""
        rows = self.flat()
        numbers = rows.unpacked_numbers().float()

        def spread(each: Tensor) -> Tensor:
            return each.float().repeat_interleave(self.group, 1)[:, : self.inputs]

        if rows.offsets is None:
            return numbers.mul_(spread(rows.scales))
        if rows.offset_kind == "zeros":
            return numbers.sub_(spread(rows.offsets)).mul_(spread(rows.scales))
        return numbers.mul_(spread(rows.scales)).add_(spread(rows.offsets))

    def columns(self, start: int, stop: int) -> "QuantizedRows":
        """Return the rows' inputs `start .. stop - 1`.

        Raises:
            ValueError: they begin or end within a group.
        """
        if (start, stop) == (0, self.inputs):
            return self
        rows, group = self.flat(), self.group
        if group >= self.inputs and start % 2 == 0:
            # Any part has the one scale of a row.
            return replace(rows, inputs=stop - start, numbers=rows.numbers_between(start, stop), group=stop - start)
        if start % group or (stop % group and stop != self.inputs):
            raise ValueError(
                f"a weight's {self.inputs} inputs are quantised in groups of {group}, which ranks cannot split at "
                f"{start} and {stop}; lower tensor_parallel_size"
            )
        groups = slice(start // group, math.ceil(stop / group))
        return replace(
            rows,
            inputs=stop - start,
            numbers=rows.numbers_between(start, stop),
            scales=rows.scales[:, groups],
            offsets=None if rows.offsets is None else rows.offsets[:, groups],
        )

    def widened(self, group: int) -> "QuantizedRows":
        """Return the same weights as int8 with float32 scales and minima, for groups of a divisor of its own."""
        rows = self.flat()
        scales, offsets = rows.scales.float(), torch.zeros_like(rows.scales, dtype=torch.float32)
        if rows.offsets is not None:
            offsets = rows.offsets.float() if rows.offset_kind == "minima" else -scales * rows.offsets.float()
        times, groups = self.group // group, -(-self.inputs // group)
        return QuantizedRows(
            "int8",
            self.inputs,
            rows.unpacked_numbers().to(torch.int8),
            group,
            scales.repeat_interleave(times, 1)[:, :groups],
            offsets.repeat_interleave(times, 1)[:, :groups],
            "minima",
        )

    def form(self) -> tuple[Any, ...]:
        """Return what is equal among rows that can lie in one weight."""
        offsets = None if self.offsets is None else self.offset_kind
        return self.kind, self.inputs, self.group, self.scales.dtype, offsets, self.nested is not None


def scales_of_rows(scale: Tensor, outputs: int, inputs: int, block: tuple[int, int] | None) -> tuple[Tensor, int]:
    """Return a checkpoint's scales of a weight as `[outputs, groups]`, and the inputs of a group.

    Args:
        scale: one for the weight, one for each row, one for blocks of rows and inputs, whatever dimensions of one are
            between, or one for groups of a row's inputs.
        block: rows and inputs of a block; None without blocks.

    Raises:
        ValueError: scales of another shape.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(outputs, 1), inputs
    if scale.numel() == outputs and scale.shape[0] == outputs:
        return scale.reshape(outputs, 1), inputs
    if block is not None:
        blocks = math.ceil(outputs / block[0]), math.ceil(inputs / block[1])
        if [count for count in scale.shape if count > 1] == [count for count in blocks if count > 1]:
            return scale.reshape(blocks).repeat_interleave(block[0], 0)[:outputs], block[1]
    if scale.ndim == 2 and scale.shape[0] == outputs and inputs % scale.shape[1] == 0:
        return scale, inputs // scale.shape[1]
    raise ValueError(f"scales of shape {list(scale.shape)} do not fit a weight of shape {[outputs, inputs]}")


def joined(parts: Sequence[QuantizedRows]) -> QuantizedRows | None:
    """Return all rows in one weight, exactly; None if float8 numbers would lie beside others.

    Parts of different forms become int8 with float32 scales and minima.
    """
    if len({part.form() for part in parts}) > 1:
        if any(part.kind == "fp8" for part in parts):
            if len({part.form()[:3] for part in parts}) > 1:
                return None
            parts = [replace(part, scales=part.scales.float()) for part in parts]
        else:
            group = math.gcd(*(part.group for part in parts))
            parts = [part.widened(group) for part in parts]

    def cat(tensors: Sequence[Tensor | None]) -> Any:
        present = [each for each in tensors if each is not None]
        return _by_bytes(torch.cat, present) if present else None

    nested = [part.nested for part in parts if part.nested is not None]
    return replace(
        parts[0],
        numbers=cat([part.numbers for part in parts]),
        scales=cat([part.scales for part in parts]),
        offsets=cat([part.offsets for part in parts]),
        nested=Nested(cat([each.scales for each in nested]), cat([each.minima for each in nested])) if nested else None,
    )


def _by_bytes(change: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    """Join tensors; those of float8 as bytes, which all operations know."""
    if tensors[0].dtype != torch.float8_e4m3fn:
        return change(tensors)
    return change([each.view(torch.uint8) for each in tensors]).view(torch.float8_e4m3fn)


class RowSource(Protocol):
    """Source of a weight's rows, dequantised."""

    def read(self, rows: Tensor, dtype: torch.dtype, /) -> Tensor:
        """Return rows, int64 `[count]`, as numbers `[count, inputs]`."""
        ...


@dataclass
class Held:
    """A weight as it is held now: as it was stored, or where a kernel set has packed it."""

    quantized: QuantizedRows | None
    source: RowSource | None = None


class QuantizedTensor(Tensor):
    """A quantised weight in the place of a plain one: of its shape, and of the dtype that it is computed in.

    Parts of it, and several joined by rows, are again quantised; parts of a packed weight, a copy into another tensor
    and an embedding's lookup are plain numbers. Products read `stored`; most other operations are refused.

    Attributes:
        held: the weight, which detached tensors share.
    """

    held: Held

    @staticmethod
    def __new__(cls, quantized: QuantizedRows, dtype: torch.dtype) -> "QuantizedTensor":
        return cls._around(Held(quantized), (len(quantized), quantized.inputs), dtype, quantized.device)

    @classmethod
    def _around(cls, held: Held, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "QuantizedTensor":
        made: QuantizedTensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=False
        )
        made.held = held
        return made

    def __init__(self, quantized: QuantizedRows, dtype: torch.dtype) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        kind = "packed" if self.held.quantized is None else self.held.quantized.kind
        return f"QuantizedTensor({list(self.shape)}, {kind}, dtype={self.dtype})"

    def packed_in(self, source: RowSource) -> None:
        """Give up the rows as they were stored: from now on they are read where a kernel set has packed them."""
        self.held.quantized, self.held.source = None, source

    @property
    def source(self) -> RowSource | None:
        """The packed weight, if it is packed."""
        return self.held.source

    def stored(self) -> QuantizedRows:
        """Return what is stored, of a weight that has not been packed."""
        assert self.held.quantized is not None, "a packed weight has no rows to be read as they were stored"
        return self.held.quantized

    def rows(self, rows: Tensor) -> Tensor:
        """Return some rows dequantised, `[*rows.shape, inputs]` in the tensor's dtype."""
        flat = rows.flatten()
        if self.source is not None:
            found = self.source.read(flat, self.dtype)
        else:
            found = chosen_rows(self.stored(), flat).dequantized().to(self.dtype)
        return found.view(*rows.shape, self.shape[1])

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the whole weight as a plain tensor."""
        rows = torch.arange(len(self), device=self.device)
        if self.source is not None:
            return self.rows(rows).to(dtype)
        parts = [chosen_rows(self.stored(), part) for part in torch.split(rows, 4096)]
        return torch.cat([part.dequantized().to(dtype) for part in parts])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # What loading needs goes past torch's dispatcher, whose first operation on a subclass takes 0.7 s.
        direct = _DIRECT.get(func)
        if direct is not None:
            return direct(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operation = _OPERATIONS.get(func)
        if operation is None:
            raise NotImplementedError(f"{func} has no meaning for quantised weights")
        return operation(*args, **(kwargs or {}))


def plain(weight: Tensor) -> Tensor:
    """Return a weight as plain numbers of its dtype; a quantised one is dequantised."""
    return weight.dequantized(weight.dtype) if isinstance(weight, QuantizedTensor) else weight


def chosen_rows(quantized: QuantizedRows, rows: Tensor) -> QuantizedRows:
    """Return rows, int64 `[count]`."""

    def chosen(each: Tensor) -> Tensor:
        return _by_bytes(lambda tensors: tensors[0][rows], [each])

    return quantized.map(chosen)


def _detach(given: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor._around(given.held, given.shape, given.dtype, given.device)


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    assert dim == 0
    if all(isinstance(each, QuantizedTensor) for each in tensors):
        parts = [each.stored() for each in tensors if isinstance(each, QuantizedTensor)]
        if (found := joined(parts)) is not None:
            return QuantizedTensor(found, tensors[0].dtype)
    dtype = next(each.dtype for each in tensors if isinstance(each, QuantizedTensor))
    return torch.cat([plain(each).to(dtype) for each in tensors])


def _slice(given: QuantizedTensor, dim: int, start: int | None, stop: int | None, step: int = 1) -> Tensor:
    assert step == 1
    begin, end, _ = slice(start, stop).indices(given.shape[dim])
    if given.source is not None:
        assert dim == 0
        return given.rows(torch.arange(begin, end))
    if dim == 0:
        return QuantizedTensor(given.stored().map(lambda each: each[begin:end]), given.dtype)
    return QuantizedTensor(given.stored().columns(begin, end), given.dtype)


def _copy(
    given: QuantizedTensor, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    if dtype is not None and dtype != given.dtype:
        return given.dequantized(dtype).to(device or given.device)
    moved = given.stored() if device is None else given.stored().map(lambda each: each.to(device))
    return QuantizedTensor(moved, given.dtype)


def _copy_into(target: Tensor, given: QuantizedTensor, non_blocking: bool = False) -> Tensor:  # noqa: ARG001
    assert not isinstance(target, QuantizedTensor)
    return target.copy_(given.dequantized(target.dtype))


def _index(given: QuantizedTensor, index: Sequence[Tensor]) -> Tensor:
    (rows,) = index
    if given.source is not None:
        return given.rows(rows)
    return QuantizedTensor(chosen_rows(given.stored(), rows), given.dtype)


def _new_empty(given: Tensor, size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.empty(size, dtype=dtype or given.dtype, device=given.device)


def _empty_like(given: Tensor, *, device: torch.device | None = None, **_: Any) -> Tensor:
    return torch.empty(given.shape, dtype=given.dtype, device=device or given.device)


_ATEN = torch.ops.aten
_OPERATIONS: dict[Any, Callable[..., Any]] = {
    _ATEN.detach.default: _detach,
    _ATEN.cat.default: _cat,
    _ATEN.slice.Tensor: _slice,
    _ATEN.index.Tensor: _index,
    _ATEN.mm.default: lambda weight, other: plain(weight) @ other,
    _ATEN.embedding.default: lambda weight, indices, *_: weight.rows(indices),
    _ATEN._to_copy.default: _copy,
    _ATEN.copy_.default: _copy_into,
    _ATEN.equal.default: lambda one, other: torch.equal(plain(one), plain(other)),
    _ATEN.new_empty.default: _new_empty,
    _ATEN.empty_like.default: _empty_like,
}
_DIRECT: dict[Any, Callable[..., Any]] = {torch.cat: _cat, Tensor.detach: _detach}
