"""Quantised weights in the place of plain ones: parts, joined weights and copies, against plain tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.reference.projection import Projection
from specdec.kernels.types.quantized_tensor import NumberKind, QuantizedRows, QuantizedTensor
from tests.quantized_rows import quantized_rows, random_rows


def tensor_of(weight: QuantizedRows) -> tuple[QuantizedTensor, Tensor]:
    """Return a weight, and the same in plain float32."""
    made = QuantizedTensor(weight, torch.float32)
    return made, made.dequantized(torch.float32)


@given(quantized_rows(), st.data())
def test_rows_are_those_of_the_plain_weight(weight: QuantizedRows, data: st.DataObject) -> None:
    quantized, plain = tensor_of(weight)
    assert quantized.shape == plain.shape
    start = data.draw(st.integers(0, len(plain) - 1))
    stop = data.draw(st.integers(start + 1, len(plain)))
    order = torch.randperm(len(plain), generator=torch.Generator().manual_seed(1))
    for found, wanted in (
        (quantized.narrow(0, start, stop - start), plain[start:stop]),
        (quantized[order], plain[order]),
    ):
        assert isinstance(found, QuantizedTensor)
        assert found.dequantized(torch.float32).equal(wanted)
    assert F.embedding(order[None], quantized).equal(plain[order][None])
    assert torch.empty_like(plain).copy_(quantized).equal(plain)
    assert quantized.to(torch.float64).equal(plain.double())
    assert torch.equal(quantized, QuantizedTensor(weight, torch.float32))


@given(st.lists(quantized_rows(inputs=96), min_size=2, max_size=3))
def test_joined_weights_are_exact_in_any_forms(weights: list[QuantizedRows]) -> None:
    tensors, plain = zip(*map(tensor_of, weights), strict=True)
    found = torch.cat(list(tensors))
    wanted = torch.cat(list(plain))
    if isinstance(found, QuantizedTensor):
        found = found.dequantized(torch.float32)
    # A zero is joined to others as a minimum, which is rounded once.
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-4)


def test_weights_of_one_form_stay_in_it() -> None:
    weights = [random_rows("uint4", rows, 512, 32, "minima", nested=True, seed=rows) for rows in (3, 5)]
    found = torch.cat([tensor_of(weight)[0] for weight in weights])
    assert isinstance(found, QuantizedTensor)
    assert found.stored().form() == weights[0].form()
    assert found.dequantized(torch.float32).equal(torch.cat([tensor_of(weight)[1] for weight in weights]))


def test_inputs_are_split_between_groups_alone() -> None:
    quantized, plain = tensor_of(random_rows("uint4", 8, 512, 32, "minima", nested=True))
    found = quantized.narrow(1, 96, 160)
    assert isinstance(found, QuantizedTensor)
    assert found.dequantized(torch.float32).equal(plain[:, 96:256])
    with pytest.raises(ValueError, match=r"512 inputs are quantised in groups of 32.*split at 16 and 48; lower tensor"):
        quantized.narrow(1, 16, 32)


@pytest.mark.parametrize("kind", ["uint4", "int8", "fp8"])
def test_inputs_that_share_one_scale_are_split_anywhere(kind: NumberKind) -> None:
    quantized, plain = tensor_of(random_rows(kind, 8, 48, 48))
    found = quantized.narrow(1, 26, 22)
    assert isinstance(found, QuantizedTensor)
    assert found.dequantized(torch.float32).equal(plain[:, 26:])


def test_plain_torch_multiplies_with_the_dequantised_weight() -> None:
    quantized, plain = tensor_of(random_rows("uint4", 20, 64, 32, "zeros"))
    x = torch.randn(3, 64)
    product = Projection(quantized)
    assert product(x).equal(Projection(plain)(x))
    assert not isinstance(product.weight, QuantizedTensor)


def test_other_operations_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="has no meaning for quantised weights"):
        tensor_of(random_rows("int8", 4, 32, 32))[0].sum()


def test_reading_rows_does_not_wait_for_the_device() -> None:
    """Captured graphs look embeddings up; a number of a meta tensor cannot be read."""
    stored = random_rows("uint4", 8, 64, 32, "minima", torch.float16, False, 0).map(lambda each: each.to("meta"))
    weight = QuantizedTensor(stored, torch.bfloat16)
    assert weight.rows(torch.arange(3, device="meta")).shape == (3, 64)
