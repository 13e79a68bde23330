"""Products with weights as quantised checkpoints store them: errors against float64, and rows in any batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from specdec.kernels.native.huge_pages import HugePages
from specdec.kernels.native.library import Library
from specdec.kernels.native.operations import NativeProjection
from specdec.kernels.native.packed_matrix import PackedMatrix
from specdec.kernels.types.quantized_tensor import NumberKind, OffsetKind, QuantizedRows, QuantizedTensor
from tests.kernels.kernel_checks import DTYPES
from tests.kernels.native_forms import (
    BYTE_FORMS,
    FORMS,
    INTEGER_FORMS,
    ROUNDING,
    as_one_byte,
    libraries,
    library,
    normal,
    rounding_of_inputs,
)
from tests.quantized_rows import quantized_rows, random_rows


def twin(weight: QuantizedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight, and the size of what it is the difference of, in float64, written element by element."""
    numbers, group = weight.unpacked_numbers().double(), torch.arange(weight.inputs) // weight.group
    scales = weight.scales.double()[:, group]
    offsets = None if weight.offsets is None else weight.offsets.double()[:, group]
    if weight.nested is not None:
        block = torch.arange(weight.inputs) // 256
        scales = weight.nested.scales.double()[:, block] * scales
        if offsets is not None and weight.nested.minima is not None:
            offsets = weight.nested.minima.double()[:, block] * offsets
    if offsets is None:
        return numbers * scales, (numbers * scales).abs()
    if weight.offset_kind == "zeros":
        return (numbers - offsets) * scales, (numbers.abs() + offsets.abs()) * scales.abs()
    return numbers * scales + offsets, (numbers * scales).abs() + offsets.abs()


def has_one_byte(own: Library, weight: QuantizedRows) -> bool:
    """Return whether the library writes an input to this weight as a byte."""
    depth = -(-weight.inputs // 8) * 8
    group = depth if weight.group >= weight.inputs else weight.group
    is_rounded = own.form in BYTE_FORMS and own.dtype != torch.float32
    return is_rounded and weight.kind == "uint4" and group == 32 and depth % 32 == 0


def check_product(own: Library, weight: QuantizedRows, rows: int, biased: bool, data: st.DataObject) -> None:
    """Check that products are exact but for the rounding of inputs and sums, and have the same bits in any batch."""
    x = normal(2, rows, weight.inputs).to(own.dtype)
    bias = normal(3, len(weight)).to(own.dtype) if biased else None
    multiply = NativeProjection(own, QuantizedTensor(weight, own.dtype), bias)
    product = multiply(x)
    exact_weight, size = twin(weight)
    met = as_one_byte(x) if has_one_byte(own, weight) else x.double()
    exact = met @ exact_weight.T + (0 if bias is None else bias.double())
    error = (product.double() - exact).abs() - ROUNDING[own.dtype] * exact.abs()
    bound = 2 * (weight.inputs + 4) * 2**-24 * (met.abs() @ size.T + 1)
    if own.form in INTEGER_FORMS and not has_one_byte(own, weight):
        bound += rounding_of_inputs(x, weight.group) @ size.T
    finite = exact.abs() < torch.finfo(own.dtype).max / 2
    assert ((error <= bound) | ~finite).all()
    start = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(start + 1, rows))
    assert multiply(x[start:end]).equal(product[start:end])


@given(libraries, quantized_rows(), st.integers(1, 25), st.booleans(), st.data())
def test_products(own: Library, weight: QuantizedRows, rows: int, biased: bool, data: st.DataObject) -> None:
    check_product(own, weight, rows, biased, data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@given(st.integers(1, 3), st.integers(1, 60), st.integers(1, 12), st.integers(1, 40), st.booleans(), st.data())
def test_products_in_whole_numbers(
    form: str, dtype: torch.dtype, threads: int, columns: int, inputs: int, rows: int, biased: bool, data: st.DataObject
) -> None:
    """Weights as real models have them: `test_products` seldom draws those that are multiplied so."""
    kind: NumberKind = data.draw(st.sampled_from(["int8", "uint4"]))
    nested = data.draw(st.booleans())
    offsets: list[OffsetKind | None] = [None, "minima"] if nested else [None, "minima", "zeros"]
    group = data.draw(st.sampled_from([32, 32, 64, 96, 128, 256]) if not nested else st.just(32))
    weight = random_rows(
        kind, columns, 32 * inputs, group, data.draw(st.sampled_from(offsets)), nested=nested, seed=rows
    )
    check_product(library(form, threads, dtype), weight, rows, biased, data)


@given(
    libraries,
    quantized_rows(),
    st.one_of(st.integers(2, 40), st.integers(41, 300)),
    st.integers(-38, 30),
    st.integers(0, 99),
)
def test_a_row_alone_has_the_same_bits_whatever_its_numbers(
    own: Library, weight: QuantizedRows, rows: int, size: int, seed: int
) -> None:
    """Several instructions multiply, and each has its own rules for numbers that underflow."""
    spread = (8 * normal(seed, rows, weight.inputs)).exp()
    x = (normal(seed + 1, rows, weight.inputs) * spread * 10.0**size).to(own.dtype)
    multiply = NativeProjection(own, QuantizedTensor(weight, own.dtype), None)
    product, alone = multiply(x), torch.cat([multiply(row[None]) for row in x])
    assert torch.equal(product.isnan(), alone.isnan())
    assert torch.equal(product.nan_to_num(), alone.nan_to_num())
    assert torch.equal(product.signbit(), alone.signbit())


@pytest.mark.parametrize("group", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("kind", "number"), [("uint4", 255), ("int8", -128), ("int8", 127)])
def test_the_largest_sums_have_the_same_bits(kind: NumberKind, number: int, group: int) -> None:
    """Numbers and inputs are as large as they may be, and some inputs as small as is counted: sums of most digits."""
    weight = random_rows(kind, 35, 768, group)
    weight.numbers.fill_(number)
    # Groups take each other away, up to their last digits.
    weight.scales.fill_(1)[:, ::2] = -1
    x = torch.full((40, 768), 255 / 128).to(torch.bfloat16)
    x[:, 7::8] = 2**-13 * torch.randint(1, 256, (40, 96), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    multiply = NativeProjection(library(FORMS[-1], 1, torch.bfloat16), QuantizedTensor(weight, torch.bfloat16))
    assert multiply(x).equal(torch.cat([multiply(row[None]) for row in x]))


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("form", FORMS)
def test_an_input_that_is_no_number_is_seen_in_its_row_alone(form: str, number: float) -> None:
    x = normal(1, 9, 64).to(torch.bfloat16)
    x[4, 40] = number
    for weight in (random_rows("uint4", 20, 64, 32, "minima"), random_rows("int8", 20, 64, 32)):
        product = NativeProjection(library(form, 1, torch.bfloat16), QuantizedTensor(weight, torch.bfloat16))(x)
        assert product.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [4]


@given(libraries, quantized_rows(), st.data())
def test_rows_of_a_packed_weight(own: Library, weight: QuantizedRows, data: st.DataObject) -> None:
    """An embedding that is packed for products gives each row rounded once."""
    embedding = QuantizedTensor(weight, own.dtype)
    NativeProjection(own, embedding)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, len(weight) - 1), min_size=1, max_size=5)))
    exact, size = twin(weight)
    found = F.embedding(chosen, embedding)
    error = (found.double() - exact[chosen]).abs() - ROUNDING[own.dtype] * exact[chosen].abs()
    finite = exact[chosen].abs() < torch.finfo(own.dtype).max / 2
    # Below the normal numbers of float16 its steps are 2^-24.
    assert ((error <= 2.0**-22 * size[chosen] + 2.0**-25) | ~finite).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_nan_among_8_bit_floats_is_seen_in_its_column_alone(form: str, dtype: torch.dtype) -> None:
    weight = random_rows("fp8", 20, 64, 32)
    weight.numbers.view(torch.uint8)[3, 40] = 0xFF
    product = NativeProjection(library(form, 1, dtype), QuantizedTensor(weight, dtype))(normal(1, 4, 64).to(dtype))
    assert product.isnan().any(0).nonzero().flatten().tolist() == [3]


def test_all_8_bit_floats_are_themselves() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None].clone()
    numbers.view(torch.uint8)[0, [0x7F, 0xFF]] = 0
    weight = QuantizedRows("fp8", 256, numbers, 256, torch.ones(1, 1))
    for form in FORMS:
        for dtype in (torch.float32, torch.bfloat16):
            product = NativeProjection(library(form, 1, dtype), QuantizedTensor(weight, dtype))(
                torch.eye(256, dtype=dtype)
            )
            assert product[:, 0].float().equal(numbers[0].float())


@pytest.mark.parametrize(
    ("weight", "bits"),
    [
        (random_rows("int8", 64, 256, 32), 8.5),
        (random_rows("uint4", 64, 256, 32, "minima"), 5.0),
        (random_rows("uint4", 64, 256, 128, "zeros"), 4 + 24 / 128),
        (random_rows("uint4", 64, 256, 32, "minima", nested=True), 4.625),
        (random_rows("fp8", 64, 256, 256), 8 + 32 / 256),
    ],
)
def test_a_packed_weight_takes_its_bits(weight: QuantizedRows, bits: float) -> None:
    tensor = QuantizedTensor(weight, torch.bfloat16)
    packed = PackedMatrix(tensor, None, torch.bfloat16, HugePages())
    assert packed._numbers.nbytes == 64 * 256 * bits / 8


def test_a_product_and_an_embedding_share_one_packed_weight() -> None:
    own = library(FORMS[-1], 1, torch.float32)
    embedding = QuantizedTensor(random_rows("int8", 40, 64, 32), torch.float32)
    parameter = torch.nn.Parameter(embedding, requires_grad=False)
    first, second = NativeProjection(own, parameter), NativeProjection(own, embedding.detach())
    assert first.packed is second.packed
    with pytest.raises(AssertionError, match="a packed weight has no rows"):
        embedding.stored()
