# mypy: allow-incomplete-defs, allow-untyped-defs, allow-untyped-decorators
"""Products of few rows with weights as quantised checkpoints store them, dequantised within."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.reference.projection import Projection
from specdec.kernels.types.product import Product
from specdec.kernels.types.quantized_tensor import QuantizedRows, QuantizedTensor
from specdec.kernels.types.types import DTYPES

# Rows of a program, for so few rows and for more: each program reads its columns' weights once, whatever its rows.
# float32 has no registers for more.
BLOCK_ROWS = (16, 64)
# Columns of a program.
BLOCK_COLUMNS = 32
# Bytes of a row's inputs that it multiplies at a time, at most; they are of one group. More would not fit in registers.
MAX_BLOCK_BYTES = 128
# Fewer inputs at a time cannot be multiplied by tensor cores.
LEAST_INPUTS = 16
# More rows than that are multiplied with the dequantised weight by torch: a prompt's. To dequantise it takes some 27
# bytes of traffic a weight, which the rows of a few draft trees would pay at every step.
MOST_ROWS = 256
INT8, UINT4, FLOAT8 = range(3)
KINDS = {"int8": INT8, "uint4": UINT4, "fp8": FLOAT8}
NO_OFFSETS, MINIMA, ZEROS = range(3)


def block_inputs(weight: QuantizedRows, dtype: torch.dtype) -> int:
    """Return the inputs that are multiplied at a time: a power of two that ends where a group does."""
    most = MAX_BLOCK_BYTES // dtype.itemsize
    if weight.group >= weight.inputs:
        return min(most, max(LEAST_INPUTS, 1 << (weight.inputs - 1).bit_length()))
    return min(most, weight.group & -weight.group)


def quantized_linear(x: Tensor, weight: QuantizedRows, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`. Numbers are multiplied as they are, which is exact, and scales with their sums.

    Args:
        x: `[rows, inputs]`, float32, bfloat16 or float16.
        weight: without nested scales, each tensor in one piece; groups of at least 16 inputs, a multiple of 16.
        bias: `[outputs]` of the same dtype, or None.

    Returns:
        `[rows, outputs]`, rounded once.

    Raises:
        ValueError: a shape, stride, dtype or group is another.
    """
    rows, inputs = x.shape
    if inputs != weight.inputs or x.stride(1) != 1 or x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype} {list(x.shape)} with strides {x.stride()}; wanted are {weight.inputs} inputs")
    size = block_inputs(weight, x.dtype)
    if weight.nested is not None or size < LEAST_INPUTS:
        raise ValueError(f"groups of {weight.group} inputs, or nested scales, are not multiplied as they are stored")
    outputs = len(weight)
    product = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    offsets = NO_OFFSETS
    if weight.offsets is not None:
        offsets = MINIMA if weight.offset_kind == "minima" else ZEROS
    if rows:
        few, many = BLOCK_ROWS
        height = few if rows <= few or x.dtype == torch.float32 else many
        grid = (triton.cdiv(outputs, BLOCK_COLUMNS), triton.cdiv(rows, height))
        quantized_linear_kernel[grid](
            x, weight.numbers.view(torch.uint8), weight.scales, weight.offsets, bias, product, rows, x.stride(0),
            OUTPUTS=outputs, INPUTS=inputs, GROUP=min(weight.group, inputs), KIND=KINDS[weight.kind], OFFSETS=offsets,
            HAS_BIAS=bias is not None, BLOCK_ROWS=height, BLOCK_COLUMNS=BLOCK_COLUMNS, BLOCK_INPUTS=size,
        )  # fmt: skip
    return product


@triton.jit(do_not_specialize=["rows"])
def quantized_linear_kernel(
    p_x,  # [rows, INPUTS]
    p_numbers,  # [OUTPUTS, INPUTS] bytes, of UINT4 half as many
    p_scales,  # [OUTPUTS, groups]
    p_offsets,  # [OUTPUTS, groups]; never read without OFFSETS
    p_bias,  # [OUTPUTS]; never read without HAS_BIAS
    p_product,  # [rows, OUTPUTS]
    rows,  # run-time: differs from step to step
    x_stride,  # run-time: x may be columns of a wider tensor
    OUTPUTS: tl.constexpr,  # a model has four or five
    INPUTS: tl.constexpr,  # so that the masks of whole blocks are left out
    GROUP: tl.constexpr,  # inputs that share a scale
    KIND: tl.constexpr,  # how bytes become numbers
    OFFSETS: tl.constexpr,  # leaves their loads and the sums of inputs out
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,  # divides GROUP, if that is not all inputs
):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    o_m = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m_n, m_m = o_n < OUTPUTS, o_m < rows
    dtype: tl.constexpr = p_x.dtype.element_ty
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    # [BLOCK_ROWS, BLOCK_COLUMNS]
    b_sum = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, INPUTS, BLOCK_INPUTS):
        o_k = start + tl.arange(0, BLOCK_INPUTS)
        m_k = o_k < INPUTS
        b_x = tl.load(p_x + o_m[:, None] * x_stride + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_w = _numbers(p_numbers, o_n, o_k, m_n[:, None] & m_k[None, :], INPUTS, KIND)
        b_part = tl.dot(b_x, tl.trans(b_w.to(dtype)), input_precision="ieee")
        group = start // GROUP
        b_scale = tl.load(p_scales + o_n * GROUPS + group, mask=m_n, other=0.0).to(tl.float32)
        if OFFSETS != 0:
            b_offset = tl.load(p_offsets + o_n * GROUPS + group, mask=m_n, other=0).to(tl.float32)
            b_inputs = tl.sum(b_x.to(tl.float32), 1)
            if OFFSETS == 1:
                b_sum += b_inputs[:, None] * b_offset[None, :]
            else:
                b_part -= b_inputs[:, None] * b_offset[None, :]
        b_sum += b_part * b_scale[None, :]
    if HAS_BIAS:
        b_sum += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    p_out = p_product + o_m[:, None] * OUTPUTS + o_n[None, :]
    tl.store(p_out, b_sum.to(dtype), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def _numbers(p_numbers, o_n, o_k, mask, INPUTS: tl.constexpr, KIND: tl.constexpr):
    """Return numbers that the dtypes of activations hold exactly, `[BLOCK_COLUMNS, BLOCK_INPUTS]`."""
    if KIND == 1:
        HALF: tl.constexpr = (INPUTS + 1) // 2
        b_bytes = tl.load(p_numbers + o_n[:, None] * HALF + (o_k // 2)[None, :], mask=mask, other=0)
        return ((b_bytes >> (o_k % 2 * 4)[None, :].to(tl.uint8)) & 15).to(tl.float32)
    b_bytes = tl.load(p_numbers + o_n[:, None] * INPUTS + o_k[None, :], mask=mask, other=0)
    if KIND == 0:
        return b_bytes.to(tl.int8, bitcast=True).to(tl.float32)
    # As float16, which has one more bit of exponent, so that its numbers are less by 2^8. GPUs before compute
    # capability 8.9 do not know float8.
    b_bits = b_bytes.to(tl.uint16)
    b_bits = ((b_bits & 0x80) << 8) | ((b_bits & 0x7F) << 7)
    b_numbers = b_bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((b_bytes & 0x7F) == 0x7F, float("nan"), b_numbers)


class QuantizedProjection:
    """A product whose weight stays as it was stored; see `Product`."""

    keeps_weight = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        assert isinstance(weight, QuantizedTensor)
        self.rows = rows = weight.stored().flat().map(Tensor.contiguous)
        weight.held.quantized = rows
        self.weight: Tensor = weight
        self.bias, self.size = bias, weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: `[rows, in_features]` to `[rows, out_features]`."""
        if len(x) <= MOST_ROWS:
            return quantized_linear(x, self.rows, self.bias)
        return F.linear(x, self.rows.dequantized().to(x.dtype), self.bias)


def projection(weight: Tensor, bias: Tensor | None) -> Product:
    """Prepare products with a weight, quantised or plain."""
    stays = isinstance(weight, QuantizedTensor) and block_inputs(weight.stored(), weight.dtype) >= LEAST_INPUTS
    return QuantizedProjection(weight, bias) if stays else Projection(weight, bias)
