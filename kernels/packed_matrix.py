"""Weights in the layouts that the compiled library reads; `matrix` in native.h describes them."""

import torch
from torch import Tensor

from specdec.kernels.huge_pages import HugePages
from specdec.kernels.integers import ceil_div
from specdec.kernels.native_library import KINDS, Q8, MatrixFields
from specdec.kernels.settings import Quantization

# Columns of a weight that lie side by side.
BLOCK = 16
# Inputs of a column that share a scale in 8 bits, and the bytes of a block's columns over them: scales, then numbers.
GROUP = 32
GROUP_BYTES = 2 * BLOCK + GROUP * BLOCK
LARGEST = 127
# The smallest normal number.
LEAST_SCALE = 2.0**-126
# Numbers of a weight that are packed at a time: a large matrix is not copied twice.
AT_A_TIME = 1 << 20


class PackedMatrix:
    """A weight and bias packed for the library.

    A float32 weight whose numbers are all bfloat16's or float16's, as in most checkpoints, is kept as such: the product
    is the same, and half as much is read.

    Args:
        weight: `[columns, inputs]`.
        bias: `[columns]` or None.
        dtype: of activations.
        memory: where it is kept.
        quantization: "q8" to keep the weight in 8 bits, which rounds it; see `pack_q8`.
        order: int64, the weight's row that each packed column holds, -1 for none; None for all in order.
        depth: packed inputs, of which those behind the weight's count nothing; None for as many as needed.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        memory: HugePages,
        quantization: Quantization = "none",
        order: Tensor | None = None,
        depth: int | None = None,
    ) -> None:
        columns, inputs = weight.shape
        depth = ceil_div(inputs, 2) * 2 if depth is None else depth
        if order is None:
            order = torch.arange(columns)
        order = torch.cat([order, order.new_full((-len(order) % BLOCK,), -1)])
        if quantization == "q8":
            kind, self._numbers = Q8, pack_q8(weight.detach(), order, depth, memory)
        else:
            exact = exact_kind(weight, dtype)
            kind, self._numbers = KINDS[exact], pack(weight.detach(), order, depth, exact, memory)
        self._bias = None
        if bias is not None:
            self._bias = torch.where(order >= 0, bias.detach().float()[order.clamp_min(0)], 0.0).contiguous()
        self.fields = MatrixFields(
            kind,
            columns,
            inputs,
            depth,
            len(order) // BLOCK,
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
    step = _blocks_at_a_time(depth)
    for start in range(0, blocks, step):
        columns = _columns(weight, order[start * BLOCK : (start + step) * BLOCK], depth, kind)
        # A pair is moved as one number.
        units = columns.view(torch.int32) if pairs == 2 else columns
        packed[start : start + step] = units.view(-1, BLOCK, depth // pairs).transpose(1, 2)
    return packed


def pack_q8(weight: Tensor, order: Tensor, depth: int, memory: HugePages) -> Tensor:
    """Pack a weight in 8 bits, with one scale for 32 inputs of a column, as in llama.cpp's Q8_0.

    A scale is the largest magnitude of its group / 127, rounded to bfloat16, which has the range of float32 in half the
    bytes. The numbers are rounded by the rounded scale, so each is within half a scale of its weight.

    Args:
        weight, order, depth, memory: as `pack` takes them.

    Returns:
        uint8 `[blocks, groups, 544]`: 16 scales, then signed bytes `[32, 16]`.
    """
    blocks, groups = len(order) // BLOCK, ceil_div(depth, GROUP)
    packed = memory.empty((blocks, groups, GROUP_BYTES), torch.uint8)
    step = _blocks_at_a_time(groups * GROUP)
    for start in range(0, blocks, step):
        rows = order[start * BLOCK : (start + step) * BLOCK]
        numbers = _columns(weight, rows, groups * GROUP, torch.float32).view(-1, BLOCK, groups, GROUP)
        scales = (numbers.abs().amax(-1) / LARGEST).clamp_min(LEAST_SCALE).bfloat16()
        numbers.div_(scales.float()[..., None]).round_()
        # A group with infinity or NaN has a scale that is not finite either, and so are products with it.
        numbers.nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)
        part = packed[start : start + step]
        part[..., : 2 * BLOCK] = scales.transpose(1, 2).contiguous().view(torch.uint8)
        places = part[..., 2 * BLOCK :].view(torch.int8).view(-1, groups, GROUP, BLOCK)
        places.copy_(numbers.to(torch.int8).permute(0, 2, 3, 1))
    return packed


def _blocks_at_a_time(depth: int) -> int:
    return max(1, AT_A_TIME // (depth * BLOCK))


def _columns(weight: Tensor, rows: Tensor, depth: int, kind: torch.dtype) -> Tensor:
    """Return rows of a weight, zeros for -1, with `depth` numbers each."""
    columns = torch.zeros(len(rows), depth, dtype=kind)
    columns[:, : weight.shape[1]] = weight[rows.clamp_min(0)]
    columns[rows < 0] = 0
    return columns
