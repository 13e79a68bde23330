# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""RMS norm, alone, behind the addition of a residual or of heads, and the gated activation: float32 within."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.types.types import DTYPES

# Numbers of a row that a program holds at once; longer rows are read twice.
MAX_BLOCK = 8192
# Numbers of a program of the activation: 8 a thread.
BLOCK_SIZE = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last dimension, rounded once.

    Args:
        x: `[rows, hidden]`, float32, bfloat16 or float16; each row in one piece.
        weight: `[hidden]`, of the same dtype.

    Returns:
        `[rows, hidden]`.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    normed, _ = _launch(x, None, weight, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the `rms_norm` of `residual + x`, and that sum, rounded to its dtype before it is normed.

    Args:
        x: `[rows, hidden]`, float32, bfloat16 or float16; each row in one piece.
        residual: the same.
        weight: `[hidden]`, of the same dtype.

    Raises:
        ValueError: shapes, strides or dtypes are others.
    """
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm and the sum; without a residual, the norm twice."""
    added = x if residual is None else residual
    if x.ndim != 2 or added.shape != x.shape or weight.shape != x.shape[1:]:
        raise ValueError(
            f"rows of x {tuple(x.shape)}, residual {tuple(added.shape)} and weight {tuple(weight.shape)} differ"
        )
    if x.dtype not in DTYPES or {added.dtype, weight.dtype} != {x.dtype}:
        raise ValueError(f"x is {x.dtype}, residual {added.dtype}, weight {weight.dtype}; all must be one of {DTYPES}")
    if x.stride(1) != 1 or added.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"strides of x {x.stride()} and residual {added.stride()} must end in 1")
    rows, hidden = x.shape
    normed = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    total = normed if residual is None else torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if rows:
        block = min(triton.next_power_of_2(hidden), MAX_BLOCK)
        rms_norm_kernel[(rows,)](
            x, added, weight, normed, total, x.stride(0), added.stride(0), eps, HIDDEN=hidden, BLOCK=block, ADD=residual
            is not None, num_warps=num_warps(block),
        )  # fmt: skip
    return normed, total


def num_warps(block: int) -> int:
    """Return the warps of a program that holds `block` numbers: 16 numbers a thread, the best for one row."""
    return min(16, max(1, block // 512))


@triton.jit
def rms_norm_kernel(
    p_x,  # [rows, HIDDEN]
    p_residual,  # [rows, HIDDEN]; never read without ADD
    p_weight,  # [HIDDEN]
    p_normed,  # [rows, HIDDEN]
    p_sum,  # [rows, HIDDEN]; never written without ADD
    x_stride,  # run-time: x may be columns of a wider tensor
    residual_stride,  # run-time, for the same reason
    eps,  # run-time: costs nothing
    HIDDEN: tl.constexpr,  # a model has one or two; where BLOCK divides it, no masks are left
    BLOCK: tl.constexpr,  # the shape of the registers
    ADD: tl.constexpr,  # leaves the loads and stores of the sum out
):
    i_row = tl.program_id(0).to(tl.int64)
    p_x += i_row * x_stride
    p_residual += i_row * residual_stride
    p_normed += i_row * HIDDEN
    p_sum += i_row * HIDDEN
    if HIDDEN <= BLOCK:
        o_x = tl.arange(0, BLOCK)
        b_x = _summed(p_x, p_residual, o_x, HIDDEN, ADD)
        if ADD:
            tl.store(p_sum + o_x, b_x, mask=o_x < HIDDEN)
        scale = _scale(b_x * b_x, HIDDEN, eps)
        _store_scaled(p_normed, p_weight, b_x, scale, o_x, HIDDEN)
    else:
        # [BLOCK]
        b_squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, HIDDEN, BLOCK):
            o_x = start + tl.arange(0, BLOCK)
            b_x = _summed(p_x, p_residual, o_x, HIDDEN, ADD)
            b_squares += b_x * b_x
        scale = _scale(b_squares, HIDDEN, eps)
        for start in range(0, HIDDEN, BLOCK):
            o_x = start + tl.arange(0, BLOCK)
            # Added once more, not read back: what a program has written it sees only behind a barrier.
            b_x = _summed(p_x, p_residual, o_x, HIDDEN, ADD)
            if ADD:
                tl.store(p_sum + o_x, b_x, mask=o_x < HIDDEN)
            _store_scaled(p_normed, p_weight, b_x, scale, o_x, HIDDEN)


@triton.jit
def _summed(p_x, p_residual, o_x, HIDDEN: tl.constexpr, ADD: tl.constexpr):
    """Return the numbers to be normed, float32 `[BLOCK]`, 0 beyond the row's end."""
    b_x = tl.load(p_x + o_x, mask=o_x < HIDDEN, other=0.0).to(tl.float32)
    if ADD:
        b_residual = tl.load(p_residual + o_x, mask=o_x < HIDDEN, other=0.0).to(tl.float32)
        # As the next layer will read it.
        b_x = (b_residual + b_x).to(p_x.dtype.element_ty).to(tl.float32)
    return b_x


@triton.jit
def _scale(b_squares, HIDDEN: tl.constexpr, eps):
    # One number a row, so that exact operations cost nothing.
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(b_squares) * (1.0 / HIDDEN) + eps))


@triton.jit
def _store_scaled(p_normed, p_weight, b_x, scale, o_x, HIDDEN: tl.constexpr):
    b_weight = tl.load(p_weight + o_x, mask=o_x < HIDDEN, other=0.0).to(tl.float32)
    tl.store(p_normed + o_x, b_x * scale * b_weight, mask=o_x < HIDDEN)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, rounded once.

    Args:
        gate_up: `[rows, 2 * intermediate]`, float32, bfloat16 or float16; each row in one piece.

    Returns:
        `[rows, intermediate]`.

    Raises:
        ValueError: shape, strides or dtype are others.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up {tuple(gate_up.shape)}, strides {gate_up.stride()}: not [rows, 2 * intermediate]")
    if gate_up.dtype not in DTYPES:
        raise ValueError(f"gate_up is {gate_up.dtype}; it must be one of {DTYPES}")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if output.numel():
        block = min(triton.next_power_of_2(size), BLOCK_SIZE)
        grid = (rows, triton.cdiv(size, block))
        silu_and_mul_kernel[grid](gate_up, output, gate_up.stride(0), SIZE=size, BLOCK=block, num_warps=4)
    return output


@triton.jit
def silu_and_mul_kernel(
    p_gate_up,  # [rows, 2 * SIZE]
    p_output,  # [rows, SIZE]
    stride,  # run-time: the input may be columns of a wider tensor
    SIZE: tl.constexpr,  # a model has one or two; where BLOCK divides it, no masks are left
    BLOCK: tl.constexpr,  # the shape of the registers
):
    i_row = tl.program_id(0).to(tl.int64)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p_gate = p_gate_up + i_row * stride
    # [BLOCK]
    b_gate = tl.load(p_gate + o_x, mask=o_x < SIZE, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + SIZE + o_x, mask=o_x < SIZE, other=0.0).to(tl.float32)
    tl.store(p_output + i_row * SIZE + o_x, b_gate / (1 + tl.exp(-b_gate)) * b_up, mask=o_x < SIZE)
