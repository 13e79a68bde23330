"""The compiled operations: errors against float64, and rows that are the same bits alone and among others."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.llama.llama_config import LlamaConfig, alibi_slopes
from specdec.draft_heads.llama.llama_layer import LlamaLayer, PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.kernels.kernel_set import KernelSet, choose_kernels
from specdec.kernels.native.library import Library
from specdec.kernels.native.operations import NativeOperations, NativeProjection
from specdec.kernels.native.packed_quantized import GROUP, q4_rows
from specdec.kernels.reference.tree_attention import tree_attention
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.settings import Quantization
from specdec.kernels.types.tree import DraftTree
from tests.kernel_sets import TORCH
from tests.kernels.attention_cases import Case, Part, blocks, build, chain, small_cases, star
from tests.kernels.kernel_checks import DTYPES
from tests.kernels.native_forms import (
    CONFIG,
    FORMS,
    INTEGER_FORMS,
    ROUNDING,
    kernels_of,
    libraries,
    library,
    normal,
    rounding_of_inputs,
)
from tests.quantized import dequantized

pytestmark = pytest.mark.slow

SCALE = 0.3
EMPTY = DraftTree()


quantizations: st.SearchStrategy[Quantization] = st.sampled_from(get_args(Quantization))


def rounded(x: Tensor, dtype: torch.dtype, kept: torch.dtype) -> Tensor:
    """Return numbers of a dtype that are also numbers of `kept`, if that is narrower."""
    return x.to(kept).to(dtype)


@given(
    libraries,
    st.integers(1, 100),
    st.integers(1, 80),
    st.integers(1, 30),
    st.sampled_from(DTYPES),
    quantizations,
    st.booleans(),
    st.data(),
)
@example(library(FORMS[-1], 2, torch.bfloat16), 200, 33, 25, torch.bfloat16, "none", True, None)
@example(library(FORMS[-1], 2, torch.bfloat16), 200, 70, 25, torch.bfloat16, "q8", True, None)
@example(library(FORMS[-1], 2, torch.float32), 200, 70, 25, torch.bfloat16, "q8", True, None)
def test_products(
    own: Library,
    columns: int,
    inputs: int,
    rows: int,
    kept: torch.dtype,
    quantization: Quantization,
    biased: bool,
    data: st.DataObject | None,
) -> None:
    """A row's product is as exact as one rounding allows, and has the same bits in every batch."""
    weight, x = rounded(normal(1, columns, inputs), own.dtype, kept), normal(2, rows, inputs).to(own.dtype)
    bias = normal(3, columns).to(own.dtype) if biased else None
    multiply = NativeProjection(own, weight, bias, quantization)
    product = multiply(x)
    if quantization == "q8":
        weight = dequantized(weight)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scale = x.double().abs() @ weight.double().abs().T + 1
    error = (product.double() - exact).abs() - ROUNDING[own.dtype] * exact.abs()
    bound = 2 * (inputs + 2) * 2**-24 * scale
    if quantization == "q8" and own.form in INTEGER_FORMS:
        bound += rounding_of_inputs(x, GROUP) @ weight.double().abs().T
    assert (error <= bound).all()
    start = data.draw(st.integers(0, rows - 1)) if data else 3
    end = data.draw(st.integers(start + 1, rows)) if data else 4
    assert multiply(x[start:end]).equal(product[start:end])


@given(
    libraries, st.integers(1, 150), st.integers(1, 1400), st.integers(40, 800), quantizations, st.booleans(), st.data()
)  # fmt: skip
@example(library(FORMS[-1], 2, torch.bfloat16), 100, 1300, 60, "none", True, None)
@example(library(FORMS[-1], 2, torch.bfloat16), 150, 1300, 737, "none", False, None)
@example(library(FORMS[-1], 3, torch.bfloat16), 150, 640, 737, "none", True, None)
def test_products_of_a_prompt(
    own: Library,
    columns: int,
    inputs: int,
    rows: int,
    quantization: Quantization,
    biased: bool,
    data: st.DataObject | None,
) -> None:
    """Many rows go through tiles, parts of the depth and stretches of rows that few do not: a row has the same bits."""
    weight, x = normal(1, columns, inputs).to(own.dtype), normal(2, rows, inputs).to(own.dtype)
    multiply = NativeProjection(own, weight, normal(3, columns).to(own.dtype) if biased else None, quantization)
    product = multiply(x)
    start = data.draw(st.integers(0, rows - 1)) if data else 20
    end = data.draw(st.integers(start + 1, rows)) if data else 50
    assert multiply(x[start:end]).equal(product[start:end])
    assert multiply(x[-1:]).equal(product[-1:])


@given(
    libraries, st.integers(1, 80), st.integers(1, 300), st.integers(2, 40), st.integers(-38, 20), st.integers(-30, 10),
    st.integers(0, 99),
)  # fmt: skip
def test_a_row_alone_has_the_same_bits_whatever_its_numbers(
    own: Library, columns: int, inputs: int, rows: int, size: int, weight_size: int, seed: int
) -> None:
    """Also of sums that underflow: several instructions multiply, and each has its own rules for them."""
    weight = (normal(seed, columns, inputs) * 10.0**weight_size).to(own.dtype)
    spread = (8 * normal(seed + 1, rows, inputs)).exp()
    x = (normal(seed + 2, rows, inputs) * spread * 10.0**size).to(own.dtype)
    multiply = NativeProjection(own, weight, None)
    alone = torch.cat([multiply(row[None]) for row in x])
    assert torch.equal(multiply(x).nan_to_num(), alone.nan_to_num())
    assert torch.equal(multiply(x).signbit(), alone.signbit())


def test_weights_are_kept_in_the_smallest_type_that_holds_them() -> None:
    own = library(FORMS[-1], 1, torch.float32)
    weight = normal(0, 20, 10)
    for kind, number in ((torch.float32, 0), (torch.bfloat16, 1), (torch.float16, 2)):
        assert NativeProjection(own, rounded(weight, torch.float32, kind)).fields.kind == number


@given(
    libraries,
    st.integers(1, 50),
    st.integers(1, 5),
    st.sampled_from([1e-6, 0.1]),
)
def test_norms(own: Library, size: int, rows: int, eps: float) -> None:
    x, weight = normal(1, rows, size).to(own.dtype), normal(2, size).to(own.dtype)
    exact = weight.double() * x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
    actual = NativeOperations(own).rms_norm(x, weight, eps)
    assert ((actual.double() - exact).abs() <= (ROUNDING[own.dtype] + 2**-20) * exact.abs() + 1e-7).all()
    assert NativeOperations(own).rms_norm(x[:1], weight, eps).equal(actual[:1])


@pytest.mark.long
@given(libraries, small_cases(), st.integers(1, 2), st.sampled_from([2, 6, 16, 32, 64, 80, 96]))
@example(library("portable", 2, torch.float32), Case([Part(70, 1, star(130), 130)], 2, 16, 0, 0), 1, 8)
@example(library(FORMS[-1], 2, torch.float32), Case([Part(2000, 1, star(3), 3)], 5, 16, 0, 0, alibi=True), 1, 8)
@example(library(FORMS[-1], 2, torch.bfloat16), Case([Part(0, 90, EMPTY, 0)], 3, 16, 0, 0), 1, 64)
@example(library(FORMS[-1], 2, torch.bfloat16), Case([Part(600, 40, star(12), 12)], 3, 16, 1, 0, alibi=True), 1, 64)
@example(library(FORMS[-1], 2, torch.bfloat16), Case([Part(600, 1, star(3), 3)], 40, 16, 0, 0), 1, 32)
def test_attention(own: Library, case: Case, kv_heads: int, dim: int) -> None:
    """A row's attention is exact, and has the same bits as if its path were cached; the rest of the cache is NaN."""
    made = build(case)
    written = ~made.kv[:, 0, 0].isnan()
    kv = torch.full((len(written), 2 * kv_heads, dim), float("nan"), dtype=own.dtype)
    kv[written] = normal(case.seed, int(written.sum()), 2 * kv_heads, dim).to(own.dtype)
    query = normal(case.seed + 1, len(made.slots_seen), kv_heads * case.group, dim).to(own.dtype)
    attend = NativeOperations(own).tree_attention
    slopes = case.slopes(kv_heads)
    actual = attend(query, kv, made.rows, SCALE, case.window, slopes)
    exact = tree_attention(query.double(), kv.double(), made.rows, SCALE, case.window, slopes)
    bound = ROUNDING[own.dtype] * exact.abs() + 2e-6 * kv[written].abs().max().double()
    if own.form == "amx" and own.dtype == torch.bfloat16 and dim % 32 == 0:
        # Weights are rounded too.
        sizes = torch.cat([kv[:, :kv_heads], kv[:, kv_heads:].abs()], 1).double()
        bound += ROUNDING[own.dtype] * tree_attention(query.double(), sizes, made.rows, SCALE, case.window, slopes)
    assert ((actual.double() - exact).abs() <= bound).all()
    for row, slots in enumerate(made.slots_seen):
        path = torch.cat([kv[slots], kv.new_full((-len(slots) % 4, *kv.shape[1:]), float("nan"))])
        rows = RaggedRows(
            query_lens=[1],
            lengths=[len(slots)],
            tree_starts=[len(slots)],
            block_tables=torch.arange(len(path) // 4)[None],
            visible=torch.tensor([len(slots)]),
            ancestors=torch.zeros(1, 1, dtype=torch.int64),
            block_size=4,
        )
        assert attend(query[row : row + 1], path, rows, SCALE, 0, slopes).equal(actual[row : row + 1])


def test_rows_of_a_block_see_each_other() -> None:
    own = library("portable", 1, torch.float32)
    made = blocks([9, 30], 7, 4)
    kv = torch.full((len(made.kv), 4, 16), float("nan"))
    written = ~made.kv[:, 0, 0].isnan()
    kv[written] = normal(1, int(written.sum()), 4, 16)
    query = normal(2, len(made.slots_seen), 8, 16)
    actual = NativeOperations(own).tree_attention(query, kv, made.rows, SCALE)
    keys, values = kv.double().unflatten(1, (2, -1)).unbind(1)
    for row, slots in enumerate(made.slots_seen):
        own_keys, own_values = (part[slots].repeat_interleave(4, 1) for part in (keys, values))
        weights = torch.softmax(torch.einsum("hd,khd->kh", query[row].double(), own_keys) * SCALE, 0)
        torch.testing.assert_close(
            actual[row].double(), torch.einsum("kh,khd->hd", weights, own_values), rtol=0, atol=1e-5
        )


configs = st.builds(
    replace,
    st.just(CONFIG),
    hidden_size=st.sampled_from([16, 24, 70]),
    intermediate_size=st.sampled_from([16, 40, 90]),
    attention_bias=st.booleans(),
    output_bias=st.booleans(),
    mlp_bias=st.booleans(),
    qk_norm=st.booleans(),
    alibi_slopes=st.sampled_from([(), alibi_slopes(CONFIG.num_heads)]),
)


def runner(
    config: LlamaConfig,
    kernels: KernelSet,
    dtype: torch.dtype,
    norm: bool,
    change: Callable[[Tensor], Tensor] = lambda weight: weight,
    num_slots: int = 80,
) -> Callable[..., Tensor]:
    """Return a layer of `config` with seeded weights over a cache of its own, as a function of states and start.

    Args:
        change: of each matrix.
        num_slots: of the cache.
    """
    torch.manual_seed(0)
    layer = LlamaLayer(config, input_norm=norm)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        parameter.data = parameter.data.bfloat16().to(dtype)
        if parameter.dim() == 2:
            parameter.data = change(parameter.data).to(dtype)
    layer.requires_grad_(False)
    served = layer.form(kernels)
    table = config.rope.table(config.head_dim, num_slots, dtype)
    kv = torch.full((num_slots, 2 * config.num_kv_heads, config.head_dim), float("nan"), dtype=dtype)

    def run(states: Tensor, start: int) -> Tensor:
        slots, rows = chain(start, len(states))
        attention = PagedAttention(kv, slots, rows, kernels, slopes=config.slopes(dtype, slots.device))
        with torch.inference_mode():
            return served(states, rotary_at(table, slots), attention)

    return run


@pytest.mark.long
@given(libraries, configs, st.integers(1, 40), quantizations, st.booleans(), st.data())
def test_layers(
    own: Library, config: LlamaConfig, count: int, quantization: Quantization, norm: bool, data: st.DataObject
) -> None:
    """A layer's outputs are those of plain torch, and the same bits however the tokens are cut into chunks."""
    states = normal(5, count, config.hidden_size).to(own.dtype)
    change: Callable[[Tensor], Tensor] = dequantized if quantization == "q8" else torch.clone
    exact = runner(config, TORCH, torch.float64, norm, change)(states.double(), 0)
    kernels = kernels_of(own, quantization)
    actual = runner(config, kernels, own.dtype, norm)(states, 0)
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}[own.dtype]
    assert (actual.double() - exact).abs().max() <= tolerance * exact.abs().max()
    in_chunks, start, pieces = runner(config, kernels, own.dtype, norm), 0, []
    while start < count:
        size = data.draw(st.integers(1, count - start))
        pieces.append(in_chunks(states[start : start + size], start))
        start += size
    assert torch.cat(pieces).equal(actual)


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_draft_heads(form: str) -> None:
    """In 4 bits a layer is that of the rounded weights; more rows than a tile has meet tiles unrounded."""
    own = library(form, 1, torch.bfloat16)
    kernels = kernels_of(own)
    rounding = kernels.rounding
    assert (rounding is None) == (not own.multiplies_bytes)
    if rounding is None:
        return
    for count in (3, 16, 17):
        states = normal(5, count, CONFIG.hidden_size).bfloat16()
        actual = runner(CONFIG, rounding, torch.bfloat16, True)(states, 0).double()
        if form == "amx" and count > 16:
            assert actual.equal(runner(CONFIG, kernels, torch.bfloat16, True)(states, 0).double())
            continue
        exact = runner(CONFIG, TORCH, torch.float64, True, in_4_bits)(states.double(), 0)
        assert (actual - exact).abs().max() <= 1e-2 * exact.abs().max()


def in_4_bits(weight: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % GROUP))
    return q4_rows(padded).dequantized()[:, : weight.shape[1]]


@given(libraries, configs, st.integers(300, 900), quantizations, st.data())
def test_a_layer_over_a_prompt(
    own: Library, config: LlamaConfig, count: int, quantization: Quantization, data: st.DataObject
) -> None:
    """The same bits in one pass, whose rows threads share, and in two."""
    states, cut = normal(5, count, config.hidden_size).to(own.dtype), data.draw(st.integers(1, count - 1))
    whole, run = (runner(config, kernels_of(own, quantization), own.dtype, True, num_slots=count) for _ in range(2))
    assert torch.cat([run(states[:cut], 0), run(states[cut:], cut)]).equal(whole(states, 0))


@pytest.mark.parametrize("quantization", get_args(Quantization))
@pytest.mark.parametrize("form", FORMS)
def test_threads_are_not_seen(form: str, quantization: Quantization) -> None:
    states = normal(5, 30, CONFIG.hidden_size)
    sets = [kernels_of(library(form, threads, torch.float32), quantization) for threads in (1, 2, 3, 7)]
    outputs = [runner(CONFIG, kernels, torch.float32, True)(states, 0) for kernels in sets]
    assert all(output.equal(outputs[0]) for output in outputs)


def test_closes_right_after_a_job() -> None:
    """No thread misses the end of its pool, however late it takes up the last job."""
    scores, limits = torch.zeros(8, 4096), torch.tensor([[0.1, 0, 1]] * 8)
    for _ in range(300):
        NativeOperations(Library(4, torch.float32)).filter_logits(scores, limits)


def test_unsupported_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="form 'sparc' does not run"):
        Library(1, torch.float32, "sparc")
    with pytest.raises(ValueError, match=r"native kernels run float32.*not torch.float64 on cpu"):
        choose_kernels("native", torch.device("cpu"), torch.float64)
    assert choose_kernels("auto", torch.device("cpu"), torch.float64).name == "torch"
    assert choose_kernels("auto", torch.device("cpu"), torch.float32).name == "native"


def test_without_the_library_plain_torch_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("specdec.kernels.kernel_set.library_file", lambda: None)
    monkeypatch.setattr("specdec.kernels.native.library.library_file", lambda: None)
    assert choose_kernels("auto", torch.device("cpu"), torch.float32).name == "torch"
    assert "install a C compiler" in caplog.text
    with pytest.raises(ValueError, match="not built: install a C compiler"):
        choose_kernels("native", torch.device("cpu"), torch.float32)
