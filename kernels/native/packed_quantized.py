"""Weights of few bits in the layout that the compiled library reads; `matrix` in native.h describes it."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.native.huge_pages import HugePages
from specdec.kernels.native.library import BLOCK, KINDS, NESTED, NO_OFFSETS, NUMBER_KINDS, OFFSET_KINDS
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.quantized_tensor import NESTED_INPUTS, QuantizedRows, chosen_rows
from specdec.kernels.types.threads import in_threads, usable_threads

# Inputs of a column that share a scale in q8 and q4.
GROUP = 32
LARGEST, MOST_IN_4_BITS = 127, 15
# Of float16.
LEAST_HALF = 2.0**-24
# The smallest normal number.
LEAST_SCALE = 2.0**-126
# Least and most numbers of a weight that are packed at a time: short operations take longer, and a large matrix is not
# copied twice.
AT_LEAST, AT_A_TIME = 1 << 17, 1 << 20
# The library reads float8 numbers as float16 with another bias.
FLOAT8_FACTOR = 2.0**8
FLOAT8_NAN = 0x7F


class Packed(NamedTuple):
    """A packed weight, and what the library has to know about it.

    Attributes:
        numbers: uint8 `[blocks, bytes]`.
        depth: packed inputs.
    """

    numbers: Tensor
    kind: int
    depth: int
    group: int
    scales: int
    offsets: int


def pack_rounded(
    weight: Tensor, order: Tensor, depth: int, memory: HugePages, quantise: Callable[[Tensor], QuantizedRows]
) -> Packed:
    """Pack a plain weight in few bits.

    Args:
        weight: `[columns, inputs]`.
        order: int64, the weight's row that each packed column holds, -1 for none; whole blocks.
        depth: packed inputs, even.
        memory: where it is kept.
        quantise: `q8_rows` or `q4_rows`.
    """
    if quantise is q4_rows:
        depth = ceil_div(depth, GROUP) * GROUP

    def rows(chosen: Tensor) -> QuantizedRows:
        numbers = torch.zeros(len(chosen), ceil_div(depth, GROUP) * GROUP)
        numbers[:, : weight.shape[1]] = weight[chosen]
        return quantise(numbers)

    return _pack(rows, order, depth, memory)


def q8_rows(numbers: Tensor) -> QuantizedRows:
    """Quantise weights to 8 bits, with one scale for 32 inputs of a row, as in llama.cpp's Q8_0.

    A scale is the largest magnitude of its group / 127, rounded to bfloat16, which has the range of float32 in half the
    bytes. The numbers are rounded by the rounded scale, so each is within half a scale of its weight.

    Args:
        numbers: float32 `[rows, inputs]`, whole groups; not to be used afterwards.
    """
    groups = numbers.view(len(numbers), numbers.shape[1] // GROUP, GROUP)
    scales = (groups.abs().amax(-1) / LARGEST).clamp_min(LEAST_SCALE).bfloat16()
    groups.div_(scales.float()[..., None]).round_()
    # A group with infinity or NaN has a scale that is not finite either, and so are products with it.
    groups.nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)
    return QuantizedRows("int8", numbers.shape[1], numbers.to(torch.int8), GROUP, scales)


def q4_rows(numbers: Tensor) -> QuantizedRows:
    """Quantise weights to 4 bits, with a scale and a minimum for 32 inputs of a row, as in llama.cpp's Q4_1.

    Args:
        numbers: float32 `[rows, inputs]`, whole groups; not to be used afterwards.
    """
    groups = numbers.view(len(numbers), numbers.shape[1] // GROUP, GROUP)
    minima = groups.amin(-1).half()
    scales = groups.amax(-1).sub_(minima).div_(MOST_IN_4_BITS).half()
    groups.sub_(minima[..., None]).div_(scales.float().clamp_min(LEAST_HALF)[..., None]).round_()
    rounded = groups.nan_to_num_(0.0).clamp_(0, MOST_IN_4_BITS).to(torch.uint8).flatten(1)
    words = rounded[:, ::2] | rounded[:, 1::2] << 4
    return QuantizedRows("uint4", numbers.shape[1], words, GROUP, scales, minima, "minima")


def pack_quantized(weight: QuantizedRows, order: Tensor, depth: int, memory: HugePages) -> Packed:
    """Pack a weight as it was stored; for the arguments see `pack_q8`."""
    if weight.kind == "uint4":
        depth = ceil_div(depth, 8) * 8
        if weight.group % 8 and weight.group < weight.inputs:
            weight = weight.widened(weight.group)
    if weight.kind == "fp8":
        weight = replace(weight, scales=weight.scales.float() * FLOAT8_FACTOR)
    if weight.group >= weight.inputs:
        # One group has all inputs, and those that are packed behind them.
        weight = replace(weight, group=depth)
    assert weight.group % 2 == 0

    def rows_of(rows: Tensor) -> QuantizedRows:
        if not len(rows) or (rows.diff() != 1).any():
            return chosen_rows(weight, rows)
        # As they mostly are; a view copies nothing.
        start = int(rows[0])
        return weight.map(lambda each: each[start : start + len(rows)])

    return _pack(rows_of, order, depth, memory)


def _pack(rows: Callable[[Tensor], QuantizedRows], order: Tensor, depth: int, memory: HugePages) -> Packed:
    """Pack rows, which are made for some packed columns at a time."""
    form = rows(order[:0].clamp_min(0))
    kind, group, minima = NUMBER_KINDS[form.kind], form.group, form.minima is not None
    blocks, groups = len(order) // BLOCK, ceil_div(depth, group)
    scale_bytes = BLOCK * form.scales.element_size()
    offset_bytes = 0 if form.offsets is None else BLOCK * form.offsets.element_size()
    group_bytes = scale_bytes + offset_bytes + group * BLOCK // (2 if form.kind == "uint4" else 1)
    nested = 0 if form.nested is None else ceil_div(depth, NESTED_INPUTS)
    nested_end = nested * 2 * BLOCK * (2 if minima else 1)
    packed = memory.empty((blocks, nested_end + groups * group_bytes), torch.uint8)
    step = blocks_at_a_time(blocks, groups * group * BLOCK)

    def put(start: int) -> None:
        chosen = order[start * BLOCK : (start + step) * BLOCK]
        own, part = rows(chosen.clamp_min(0)), packed[start : start + step]
        if nested:
            factors = part[:, :nested_end].view(len(part), nested, -1)
            assert own.nested is not None
            _put(factors[..., : 2 * BLOCK], own.nested.scales, chosen)
            if own.nested.minima is not None:
                _put(factors[..., 2 * BLOCK :], own.nested.minima, chosen)
        whole = part[:, nested_end:].view(len(part), groups, group_bytes)
        scales = own.scales if own.kind != "fp8" else _with_nan(own)
        _put(whole[..., :scale_bytes], scales, chosen)
        if own.offsets is not None:
            _put(whole[..., scale_bytes : scale_bytes + offset_bytes], own.offsets, chosen)
        _put_numbers(whole[..., scale_bytes + offset_bytes :], own, chosen)

    in_threads(put, range(0, blocks, step))
    scale_kind = NESTED if form.nested is not None else KINDS[form.scales.dtype]
    offset_kind = NO_OFFSETS if form.offsets is None else OFFSET_KINDS[form.offset_kind]
    return Packed(packed, kind, depth, group, scale_kind, offset_kind)


def blocks_at_a_time(blocks: int, numbers: int) -> int:
    """Return how many blocks of `numbers` numbers a thread packs at a time."""
    share = ceil_div(blocks * numbers, usable_threads())
    return max(1, min(max(share, AT_LEAST), AT_A_TIME) // numbers)


def _put(places: Tensor, numbers: Tensor, order: Tensor) -> None:
    """Write numbers `[columns, groups]` as bytes `[blocks, groups, 16 * size]`; zeros for columns without a row."""
    own = padded(numbers, places.shape[1], order)
    places.copy_(own.view(-1, BLOCK, places.shape[1]).transpose(1, 2).contiguous().view(torch.uint8))


def padded(numbers: Tensor, size: int, order: Tensor) -> Tensor:
    """Return numbers `[columns, size]`, cut or with zeros behind them; zeros for columns without a row."""
    is_empty = order < 0
    if numbers.shape[1] == size and not is_empty.any():
        return numbers
    padded = numbers.new_zeros(len(numbers), size)
    padded[:, : min(size, numbers.shape[1])] = numbers[:, :size]
    padded[is_empty] = 0
    return padded


def _put_numbers(places: Tensor, own: QuantizedRows, order: Tensor) -> None:
    """Write the groups' numbers of 16 columns as bytes `[blocks, groups, bytes]`; zeros for columns without a row."""
    groups, numbers = places.shape[1], own.numbers.view(torch.uint8)
    filled = padded(numbers, groups * own.group // (2 if own.kind == "uint4" else 1), order)
    if own.kind != "uint4":
        places.view(-1, groups, own.group, BLOCK).copy_(filled.view(-1, BLOCK, groups, own.group).permute(0, 2, 3, 1))
        return
    if own.inputs % 2:
        # The last byte holds one number.
        filled = filled.clone()
        filled[:, own.inputs // 2] &= 15
    # A word holds eight inputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 of its bits.
    even, odd = filled.view(-1, BLOCK, groups, own.group // 8, 2, 2).unbind(-1)
    words = torch.cat([even & 15 | odd << 4, even >> 4 | odd & 0xF0], -1)
    places.view(-1, groups, own.group // 8, BLOCK, 4).copy_(words.permute(0, 2, 3, 1, 4))


def _with_nan(own: QuantizedRows) -> Tensor:
    """Return the scales, NaN for groups with a float8 NaN, which the library does not know."""
    is_nan = own.numbers.view(torch.uint8) & FLOAT8_NAN == FLOAT8_NAN
    if not is_nan.any():
        return own.scales
    columns, inputs = is_nan.nonzero(as_tuple=True)
    scales = own.scales.clone()
    scales[columns, inputs // own.group] = float("nan")
    return scales
