"""The Triton product with quantised weights against float64 and against plain torch."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from specdec.kernels.reference.projection import Projection
from specdec.kernels.reference.quantized_linear import quantized_linear as reference
from specdec.kernels.triton import quantized_linear as kernel
from specdec.kernels.triton.quantized_linear import QuantizedProjection, block_inputs, projection, quantized_linear
from specdec.kernels.types.quantized_tensor import QuantizedRows, QuantizedTensor
from tests.kernels.kernel_checks import DEVICE, DTYPES, ROUNDING, poisoned_outputs
from tests.quantized_rows import quantized_rows, random_rows


@pytest.fixture(autouse=True, scope="module")
def nan_outputs() -> Iterator[None]:
    with poisoned_outputs("quantized_linear"):
        yield


@pytest.mark.long
@given(quantized_rows(), st.integers(1, 20) | st.integers(60, 140), st.booleans(), st.sampled_from(DTYPES))
@example(random_rows("uint4", 70, 256, 64, "zeros"), 17, True, torch.bfloat16)
@example(random_rows("fp8", 33, 300, 128), 3, False, torch.float16)
def test_products(weight: QuantizedRows, rows: int, biased: bool, dtype: torch.dtype) -> None:
    weight = weight.flat().map(lambda each: each.to(DEVICE).contiguous())
    if block_inputs(weight, dtype) < kernel.LEAST_INPUTS:
        with pytest.raises(ValueError, match=r"groups of \d+ inputs, or nested scales, are not multiplied as they are"):
            quantized_linear(torch.zeros(rows, weight.inputs, dtype=dtype, device=DEVICE), weight, None)
        return
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, weight.inputs, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(len(weight), generator=generator).to(DEVICE, dtype) if biased else None
    actual, plain = quantized_linear(x, weight, bias), reference(x, weight, bias)
    exact = x.double() @ weight.dequantized().double().T + (0 if bias is None else bias.double())
    offsets = 0 if weight.offsets is None else weight.offsets.double().abs().amax(1)
    size = weight.scales.double().abs().amax(1) * (256 if weight.kind != "fp8" else 448)
    bound = (weight.inputs + 8) * 2**-24 * x.double().abs().sum(1, keepdim=True) * (size + offsets * (size + 1))
    finite = exact.abs() < torch.finfo(dtype).max / 2
    for found in (actual, plain):
        error = (found.double() - exact).abs() - 2 * ROUNDING[dtype] * exact.abs()
        assert ((error <= bound) | ~finite).all()
    if rows <= kernel.BLOCK_ROWS[0] or DEVICE.type == "cpu":
        # A GPU may sum in another order where it multiplies more rows at a time.
        assert quantized_linear(x[:1], weight, bias).equal(actual[:1])


def test_prompts_are_multiplied_with_the_dequantised_weight() -> None:
    tensor = QuantizedTensor(
        random_rows("uint4", 40, 64, 32, "minima", nested=False).map(lambda t: t.to(DEVICE)), torch.float32
    )
    product = projection(tensor, None)
    assert isinstance(product, QuantizedProjection)
    x = torch.randn(kernel.MOST_ROWS + 1, 64, device=DEVICE)
    torch.testing.assert_close(product(x)[:5], product(x[:5]), rtol=1e-4, atol=1e-3)


def test_small_groups_are_dequantised() -> None:
    assert isinstance(projection(QuantizedTensor(random_rows("int8", 4, 48, 24), torch.float32), None), Projection)


def test_a_nan_among_8_bit_floats_is_seen() -> None:
    weight = random_rows("fp8", 20, 64, 32).map(lambda each: each.to(DEVICE))
    weight.numbers.view(torch.uint8)[3, 40] = 0x7F
    product = quantized_linear(torch.randn(4, 64, device=DEVICE), weight, None)
    assert product.isnan().any(0).nonzero().flatten().tolist() == [3]


def test_the_twin_computes_in_float64() -> None:
    """It rounded its inputs to float32."""
    weight = random_rows("fp8", 20, 64, 32)
    generator = torch.Generator().manual_seed(0)
    x, bias = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((4, 64), (20,)))
    product = reference(x, weight, bias)
    torch.testing.assert_close(product, x @ weight.dequantized().double().T + bias, rtol=1e-13, atol=1e-13)
