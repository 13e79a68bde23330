"""Weights in the layouts that the compiled library reads; `matrix` in native.h describes them."""

from typing import Literal

import torch
from torch import Tensor

from specdec.kernels.native.huge_pages import HugePages
from specdec.kernels.native.library import BLOCK, KINDS, MatrixFields
from specdec.kernels.native.packed_quantized import (
    Packed,
    blocks_at_a_time,
    pack_quantized,
    pack_rounded,
    padded,
    q4_rows,
    q8_rows,
)
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.quantized_tensor import QuantizedTensor
from specdec.kernels.types.threads import in_threads

# Of plain weights: those that a user may ask for, and that of draft heads' output matrices.
Rounding = Literal["none", "q8", "q4"]


def blocks_in_turn(columns: int) -> Tensor:
    """Return the order of gate's and up's columns in their joined weight: two blocks of each in turn.

    Args:
        columns: of each.

    Returns:
        int64, see `PackedMatrix`: rows of gate, of up behind them, and -1 behind each one's last.
    """
    places = torch.arange(ceil_div(columns, 2 * BLOCK) * 2 * BLOCK)
    gate = torch.where(places < columns, places, -1).view(-1, 1, 2 * BLOCK)
    return torch.cat([gate, torch.where(gate >= 0, gate + columns, -1)], 1).flatten()


class PackedMatrix:
    """A weight and bias packed for the library.

    A float32 weight whose numbers are all bfloat16's or float16's, as in most checkpoints, is kept as such: the product
    is the same, and half as much is read. A quantised weight keeps the numbers and scales that were stored.

    Args:
        weight: `[columns, inputs]`.
        bias: `[columns]` or None.
        dtype: of activations.
        memory: where it is kept.
        quantization: to keep a plain weight in few bits, which rounds it; see `q8_rows` and `q4_rows`.
        order: int64, the weight's row that each packed column holds, -1 for none; None for all in order.
        depth: packed inputs, of which those behind the weight's count nothing; None for as many as needed.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        memory: HugePages,
        quantization: Rounding = "none",
        order: Tensor | None = None,
        depth: int | None = None,
    ) -> None:
        columns, inputs = weight.shape
        depth = ceil_div(inputs, 2) * 2 if depth is None else depth
        if order is None:
            order = torch.arange(columns)
        order = torch.cat([order, order.new_full((-len(order) % BLOCK,), -1)])
        if isinstance(weight, QuantizedTensor):
            made = pack_quantized(weight.stored(), order, depth, memory)
        elif quantization != "none":
            made = pack_rounded(weight.detach(), order, depth, memory, q8_rows if quantization == "q8" else q4_rows)
        else:
            exact = exact_kind(weight, dtype)
            numbers = pack(weight.detach(), order, depth, exact, memory)
            made = Packed(numbers, KINDS[exact], depth, 0, 0, 0)
        self._numbers = made.numbers
        self._bias = None
        if bias is not None:
            self._bias = torch.where(order >= 0, bias.detach().float()[order.clamp_min(0)], 0.0).contiguous()
        self.fields = MatrixFields(
            made.kind,
            columns,
            inputs,
            made.depth,
            len(order) // BLOCK,
            made.group,
            made.scales,
            made.offsets,
            dtype != torch.float32,
            self._numbers.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
        )


def exact_kind(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the smallest dtype that holds every number of a weight as it is in `dtype`."""
    if dtype != torch.float32:
        return dtype
    for kind in (torch.bfloat16, torch.float16):
        if all(torch.equal(part, part.to(kind).to(dtype)) for part in torch.split(weight, 4096)):
            return kind
    return dtype


def pack(weight: Tensor, order: Tensor, depth: int, kind: torch.dtype, memory: HugePages) -> Tensor:
    """Pack a weight in a floating-point type.

    Args:
        weight: `[columns, inputs]`.
        order: int64, the weight's row that each packed column holds, -1 for none; whole blocks.
        depth: packed inputs, even.
        memory: where it is kept.

    Returns:
        `[blocks, depth, 16]`, or in bfloat16 `[blocks, depth / 2, 16]` of pairs in 32 bits.
    """
    blocks = len(order) // BLOCK
    pairs = 2 if kind == torch.bfloat16 else 1
    packed = memory.empty((blocks, depth // pairs, BLOCK), torch.int32 if pairs == 2 else kind)
    step = blocks_at_a_time(blocks, depth * BLOCK)

    def put(start: int) -> None:
        rows = order[start * BLOCK : (start + step) * BLOCK]
        columns = padded(weight[rows.clamp_min(0)].to(kind), depth, rows)
        # A pair is moved as one number.
        units = columns.view(torch.int32) if pairs == 2 else columns
        packed[start : start + step] = units.view(-1, BLOCK, depth // pairs).transpose(1, 2)

    in_threads(put, range(0, blocks, step))
    return packed
