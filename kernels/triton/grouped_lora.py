# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Adapters beside a product (LoRA 2106.09685), rows grouped by their adapter (as in Punica, 2310.18547).

Two launches: the first matrices of all parts, then the second ones, which add to the product's outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.types.adapters import TILE_COLUMNS, TILE_ROWS, AdapterRows, StackedLowRank
from specdec.kernels.types.types import DTYPES

# Numbers of a rank that a program makes or reads at a time, and inputs that it reads at a time.
BLOCK_RANK = 16
BLOCK_INPUTS = 128


def grouped_lora(x: Tensor, out: Tensor, weights: StackedLowRank, rows: AdapterRows) -> None:
    """Add to `out` what each row's adapter makes of `x`.

    Sums are float32, rounded between the two matrices and at the end. Rows without an adapter are not read.
    A row's result does not depend on the other rows.

    Args:
        x: `[rows, inputs]`, float32, bfloat16 or float16; each row in one piece.
        out: `[rows, columns]`, of the same dtype; each row in one piece.
        weights: of the same dtype.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    _, parts, rank, inputs = weights.down.shape
    columns = weights.up.shape[1]
    if x.ndim != 2 or x.shape[1] != inputs or out.shape != (len(x), columns):
        raise ValueError(f"x {tuple(x.shape)} and out {tuple(out.shape)} are not rows of {inputs} and of {columns}")
    if x.dtype not in DTYPES or {out.dtype, weights.down.dtype, weights.up.dtype} != {x.dtype}:
        raise ValueError(f"x is {x.dtype}, out {out.dtype}, weights {weights.down.dtype}; all must be one of {DTYPES}")
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"strides of x {x.stride()} and out {out.stride()} must end in 1")
    tiles, ranks = len(rows.tiles), triton.cdiv(rank, BLOCK_RANK)
    low = torch.empty(len(rows.order), parts * rank, dtype=x.dtype, device=x.device)
    low_kernel[(tiles, parts * ranks)](
        x, weights.down, low, weights.ranks, rows.order, rows.tiles, x.stride(0), PARTS=parts, RANK=rank, INPUTS=inputs,
        BLOCK_ROWS=TILE_ROWS, BLOCK_RANK=BLOCK_RANK, BLOCK_INPUTS=BLOCK_INPUTS,
    )  # fmt: skip
    add_kernel[(tiles, len(weights.tiles))](
        low, weights.up, out, weights.ranks, weights.tiles, rows.order, rows.tiles, out.stride(0), PARTS=parts,
        RANK=rank, COLUMNS=columns, BLOCK_ROWS=TILE_ROWS, BLOCK_RANK=BLOCK_RANK, BLOCK_COLUMNS=TILE_COLUMNS,
    )  # fmt: skip


@triton.jit
def low_kernel(
    p_x,  # [rows, INPUTS]
    p_down,  # [places, PARTS, RANK, INPUTS]
    p_low,  # [adapted rows, PARTS, RANK]
    p_ranks,  # [places, PARTS]
    p_order,  # [adapted rows]
    p_tiles,  # [tiles, 3]: place, begin, end
    x_stride,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    p_tile = p_tiles + tl.program_id(0) * 3
    place, begin, end = tl.load(p_tile).to(tl.int64), tl.load(p_tile + 1), tl.load(p_tile + 2)
    blocks: tl.constexpr = (RANK + BLOCK_RANK - 1) // BLOCK_RANK
    part = tl.program_id(1) // blocks
    start = tl.program_id(1) % blocks * BLOCK_RANK
    rank = tl.load(p_ranks + place * PARTS + part)
    if start < rank:
        at = begin + tl.arange(0, BLOCK_ROWS)
        is_row = at < end
        row = tl.load(p_order + at, mask=is_row, other=0)
        number = start + tl.arange(0, BLOCK_RANK)
        is_number = number < RANK
        depth = tl.arange(0, BLOCK_INPUTS)
        p_rows = p_x + row[:, None] * x_stride
        p_own = p_down + ((place * PARTS + part) * RANK + number[None, :]) * INPUTS
        total = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)
        for first in range(0, INPUTS, BLOCK_INPUTS):
            k = first + depth
            x = tl.load(p_rows + k[None, :], mask=is_row[:, None] & (k < INPUTS)[None, :], other=0.0)
            down = tl.load(p_own + k[:, None], mask=is_number[None, :] & (k < INPUTS)[:, None], other=0.0)
            total = tl.dot(x, down, total, input_precision="ieee")
        p_to = p_low + (at[:, None].to(tl.int64) * PARTS + part) * RANK + number[None, :]
        tl.store(p_to, total.to(p_low.dtype.element_ty), mask=is_row[:, None] & is_number[None, :])


@triton.jit
def add_kernel(
    p_low,  # [adapted rows, PARTS, RANK]
    p_up,  # [places, COLUMNS, RANK]
    p_out,  # [rows, COLUMNS]
    p_ranks,  # [places, PARTS]
    p_columns,  # [column tiles, 3]: part, begin, end
    p_order,  # [adapted rows]
    p_tiles,  # [tiles, 3]: place, begin, end
    out_stride,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    p_tile, p_span = p_tiles + tl.program_id(0) * 3, p_columns + tl.program_id(1) * 3
    place, begin, end = tl.load(p_tile).to(tl.int64), tl.load(p_tile + 1), tl.load(p_tile + 2)
    part, first, beyond = tl.load(p_span), tl.load(p_span + 1), tl.load(p_span + 2)
    rank = tl.load(p_ranks + place * PARTS + part)
    if (rank > 0) & (begin < end):
        at = begin + tl.arange(0, BLOCK_ROWS)
        is_row = at < end
        row = tl.load(p_order + at, mask=is_row, other=0)
        column = first + tl.arange(0, BLOCK_COLUMNS)
        is_column = column < beyond
        numbers = tl.arange(0, BLOCK_RANK)
        p_rows = p_low + (at[:, None].to(tl.int64) * PARTS + part) * RANK
        p_own = p_up + (place * COLUMNS + column[None, :]) * RANK
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for start in range(0, rank, BLOCK_RANK):
            k = start + numbers
            low = tl.load(p_rows + k[None, :], mask=is_row[:, None] & (k < rank)[None, :], other=0.0)
            up = tl.load(p_own + k[:, None], mask=is_column[None, :] & (k < rank)[:, None], other=0.0)
            total = tl.dot(low, up, total, input_precision="ieee")
        p_to = p_out + row[:, None] * out_stride + column[None, :]
        is_out = is_row[:, None] & is_column[None, :]
        added = tl.load(p_to, mask=is_out, other=0.0).to(tl.float32) + total
        tl.store(p_to, added.to(p_out.dtype.element_ty), mask=is_out)
