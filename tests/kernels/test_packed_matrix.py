"""Packing in 8 and 4 bits: where each number lies, how far it is from its weight, and special weights."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.draft_heads.llama.linear import Linear
from specdec.draft_heads.llama.llama_layer import LlamaLayer
from specdec.kernels.native.huge_pages import HugePages
from specdec.kernels.native.library import BLOCK, KINDS, NUMBER_KINDS, Library
from specdec.kernels.native.operations import NativeLayer, NativeProjection
from specdec.kernels.native.packed_matrix import PackedMatrix, Rounding
from specdec.kernels.native.packed_quantized import GROUP, pack_rounded, q4_rows, q8_rows
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.quantized_tensor import QuantizedTensor
from specdec.kernels.types.settings import Quantization
from tests.kernels.native_forms import CONFIG, FORMS, kernels_of, library, normal
from tests.quantized import dequantized
from tests.quantized_rows import random_rows

pytestmark = pytest.mark.slow

# Of a block's columns over a group: scales, then numbers.
GROUP_BYTES = 2 * BLOCK + GROUP * BLOCK


def unpacked(packed: Tensor) -> list[Tensor]:
    """Return numbers and scales, float64 `[columns, inputs]`, by the layout in native.h."""
    blocks = len(packed)
    packed = packed.view(blocks, -1, GROUP_BYTES)
    groups = packed.shape[1]
    scales = packed[..., : 2 * BLOCK].contiguous().view(torch.bfloat16).double()
    numbers = packed[..., 2 * BLOCK :].contiguous().view(torch.int8).double().view(blocks, groups, GROUP, BLOCK)
    scales = scales[:, :, None].expand_as(numbers)
    return [each.permute(0, 3, 1, 2).reshape(blocks * BLOCK, groups * GROUP) for each in (numbers, scales)]


@given(st.integers(1, 60), st.integers(1, 100), st.sampled_from([1e-38, 1e-6, 1.0, 1e30]), st.data())
def test_numbers_are_within_half_a_scale(columns: int, inputs: int, size: float, data: st.DataObject) -> None:
    weight = normal(1, columns, inputs) * size
    order = torch.arange(ceil_div(columns, BLOCK) * BLOCK)
    order = torch.where(order < columns, order, -1)[
        torch.randperm(len(order), generator=torch.Generator().manual_seed(2))
    ]
    depth = ceil_div(inputs, 2) * 2 + data.draw(st.sampled_from([0, 2, 16, 34]))
    packed = pack_rounded(weight, order, depth, HugePages(), q8_rows).numbers
    assert packed.shape == (len(order) // BLOCK, ceil_div(depth, GROUP) * GROUP_BYTES)
    numbers, scales = unpacked(packed)
    wanted = torch.zeros_like(numbers)
    wanted[order >= 0, :inputs] = weight[order[order >= 0]].double()
    assert ((wanted - numbers * scales).abs() <= scales / 2 * (1 + 1e-6)).all()
    # No scale is coarser than the largest number asks for.
    largest = wanted.view(len(order), -1, GROUP).abs().amax(-1)
    assert (scales.view(len(order), -1, GROUP)[..., 0] <= (largest / 127 * (1 + 2.0**-8)).clamp_min(2.0**-126)).all()
    assert (numbers[order < 0] == 0).all()
    assert (numbers[:, inputs:] == 0).all()


def test_numbers_are_those_of_the_twin() -> None:
    weight = normal(3, 48, 100)
    numbers, scales = unpacked(pack_rounded(weight, torch.arange(48), 100, HugePages(), q8_rows).numbers)
    assert (numbers * scales)[:, :100].equal(dequantized(weight))


def test_a_group_of_zeros_is_zero_and_one_huge_number_costs_its_own_group_alone() -> None:
    weight = normal(1, 16, 96)
    weight[:, 32:64] = 0
    weight[3, 70] = 1e6
    numbers, scales = unpacked(pack_rounded(weight, torch.arange(16), 96, HugePages(), q8_rows).numbers)
    kept = numbers * scales
    assert (kept[:, 32:64] == 0).all()
    assert kept[3, 70] == pytest.approx(1e6, rel=1 / 127)
    assert (kept[3, 64:96].count_nonzero()) == 1
    assert (kept[3, :32] - weight[3, :32].double()).abs().max() < 0.02


@given(st.integers(1, 40), st.integers(1, 150), st.integers(-20, 10), st.integers(0, 99))
def test_4_bits_are_within_half_a_step(rows: int, inputs: int, size: int, seed: int) -> None:
    """A step is a fifteenth of what a group's least and largest are apart; scale and minimum are rounded to float16."""
    weight = normal(seed, rows, -(-inputs // GROUP) * GROUP) * 2.0**size
    groups = weight.view(rows, -1, GROUP)
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    kept = q4_rows(weight.clone()).dequantized().view_as(groups)
    bound = (most - least) / 30 + 2.0**-9 * (least.abs() + most.abs()) + 2.0**-20
    assert ((kept - groups).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_product_in_4_bits_is_that_of_the_rounded_weight(form: str, dtype: torch.dtype) -> None:
    own, weight = library(form, 1, dtype), normal(1, 50, 70).to(dtype)
    padded = torch.nn.functional.pad(weight.float(), (0, 96 - 70))
    rounded = q4_rows(padded).dequantized()[:, :70].double()
    x = normal(2, 9, 70).to(dtype)
    product = NativeProjection(own, weight, quantization="q4")(x).double()
    largest = x.double().abs().amax(1, keepdim=True) / 250 if own.multiplies_bytes else 0
    exact = x.double() @ rounded.T
    assert ((product - exact).abs() <= 2.0**-7 * exact.abs() + largest * rounded.abs().sum(1) + 1e-4).all()
    assert torch.cat([NativeProjection(own, weight, quantization="q4")(row[None]) for row in x]).double().equal(product)


@pytest.mark.skipif("avx512_bf16" not in FORMS, reason="the processor has no products of bfloat16")
def test_the_form_with_products_of_bfloat16_is_for_activations_in_bfloat16() -> None:
    assert library("avx512_bf16", 1, torch.bfloat16).form == "avx512_bf16"
    assert library("avx512_bf16", 1, torch.float32).form == library("", 1, torch.float16).form == "avx512"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_products_of_special_weights(form: str, dtype: torch.dtype) -> None:
    """Zeros give zero, one huge number gives its product, and one that is not finite is seen in its column alone."""
    own: Library = library(form, 1, dtype)
    weight = torch.zeros(20, 70, dtype=dtype)
    weight[1, 40], weight[2, 69], weight[3, 5] = 2.0**60, float("inf"), float("nan")
    x = normal(2, 5, 70).to(dtype)
    product = NativeProjection(own, weight, quantization="q8")(x)
    assert (product[:, [0, *range(4, 20)]] == 0).all()
    torch.testing.assert_close(product[:, 1].double(), x[:, 40].double() * 2.0**60, rtol=2.0**-7, atol=0)
    assert not product[:, 2:4].isfinite().any()


@pytest.mark.parametrize(("quantization", "bits"), [("none", 16), ("q8", 8.5), ("q4", 5)])
def test_a_packed_weight_takes_its_bits(quantization: Rounding, bits: float) -> None:
    packed = PackedMatrix(torch.ones(64, 128, dtype=torch.bfloat16), None, torch.bfloat16, HugePages(), quantization)
    assert packed._numbers.nbytes == 64 * 128 * bits / 8
    kinds = {"q8": NUMBER_KINDS["int8"], "q4": NUMBER_KINDS["uint4"]}
    assert packed.fields.kind == kinds.get(quantization, KINDS[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_of_draft_heads_are_in_4_bits_but_in_float32(dtype: torch.dtype) -> None:
    """Of heads with a matrix of their own, and of those that use the target's, unless that is quantised or given up."""
    own = library(FORMS[-1], 1, dtype)
    kernels, matrix = kernels_of(own), normal(1, 40, 64).to(dtype)
    target = kernels.projection(normal(2, 40, 64).to(dtype), None)
    made, shared = kernels.draft_output(matrix, target), kernels.draft_output(None, target)
    assert isinstance(made, NativeProjection)
    assert isinstance(shared, NativeProjection)
    assert (made.fields.kind == NUMBER_KINDS["uint4"]) == own.multiplies_bytes
    assert (shared is target) != own.multiplies_bytes
    x = normal(3, 5, 64).to(dtype)
    assert (shared(x).float() - target(x).float()).abs().mean() < 0.1 * target(x).float().abs().mean()
    quantised = kernels.projection(QuantizedTensor(random_rows("int8", 40, 64, 32), dtype), None)
    assert kernels.draft_output(None, quantised) is quantised
    target.weight = target.weight.new_empty(0)
    assert kernels.draft_output(None, target) is target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_of_draft_heads_are_in_4_bits_but_in_float32(dtype: torch.dtype) -> None:
    """What the head reads of the target is multiplied as it is, once a token."""
    own = library(FORMS[-1], 1, dtype)
    head = Eagle3Head(Eagle3Config(CONFIG, (0, 1, 2), CONFIG.hidden_size, 60)).to(dtype).requires_grad_(False)
    form = head.form(kernels_of(own))
    (mixer,) = form.mixers
    assert isinstance(mixer.fused, NativeLayer)
    fields = mixer.fused.fields
    kinds = {weight.kind for weight in (fields.qkv, fields.output, fields.gate_up, fields.down)}
    assert kinds == {NUMBER_KINDS["uint4"] if own.multiplies_bytes else KINDS[dtype]}
    assert form.fc.fields.kind == KINDS[dtype]


def test_layers_that_ranks_share_are_not_rounded() -> None:
    head = Eagle3Head(Eagle3Config(CONFIG, (0, 1, 2), CONFIG.hidden_size, 60)).bfloat16().requires_grad_(False)
    (layer,) = head.decoder_layers
    layer.mlp.reduce = torch.Tensor.clone
    (mixer,) = head.form(kernels_of(library(FORMS[-1], 1, torch.bfloat16))).mixers
    assert mixer.products["qkv"].fields.kind == KINDS[torch.bfloat16]


@pytest.mark.parametrize("quantization", ["none", "q8"])
def test_prepared_layers_do_not_keep_their_weights(quantization: Quantization) -> None:
    layer = LlamaLayer(CONFIG).requires_grad_(False)
    weights = [weakref.ref(part.weight) for part in layer.modules() if isinstance(part, Linear)]
    assert len(weights) == 4
    served = layer.form(kernels_of(library(FORMS[-1], 1, torch.float32), quantization))
    gc.collect()
    assert served.mixer.fused is not None
    assert [weight() for weight in weights] == [None] * 4
