# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""The gated activation of a Llama MLP, float32 within."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.reference import DTYPES

# Numbers of a program: 8 a thread.
BLOCK_SIZE = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, rounded once.

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
