"""Keys and values in 8 bits: codes against torch's own, stores of all kernel sets, and attention's error."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.llama.llama_layer import LlamaLayer, PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.native.library import Library
from specdec.kernels.native.operations import NativeOperations
from specdec.kernels.reference import rotary_store as rotary_store_reference
from specdec.kernels.reference import tree_attention as tree_attention_reference
from specdec.kernels.triton.rotary_store import rotary_store
from specdec.kernels.triton.tree_attention import tree_attention
from specdec.kernels.types import kv_entries
from specdec.kernels.types.ragged_rows import RaggedRows
from tests.coded_cache import CODES, as_stored, coded, empty_codes, is_unwritten, numbers_of, scales_in
from tests.kernel_sets import TORCH
from tests.kernels.attention_cases import Built, Case, biases, build, chain, small_cases
from tests.kernels.kernel_checks import DEVICE, DTYPES, ROUNDING, on_device
from tests.kernels.native_forms import CONFIG, FORMS, kernels_of, libraries, library, normal
from tests.strategies import seeds

pytestmark = pytest.mark.filterwarnings(
    "ignore:divide by zero encountered in log2", "ignore:.*encountered in (multiply|divide)"
)
# Of the compiled library.
CPU = torch.device("cpu")
SCALE = 0.3
codes = st.sampled_from(CODES)
# Half the distance of codes, as a share of the number; below the least normal code, of that.
HALF_STEP = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
LEAST_NORMAL = {torch.float8_e4m3fn: 2.0**-6, torch.float8_e5m2: 2.0**-14}


def drawn_scales(seed: int, heads: int) -> Tensor:
    """Return scales of a checkpoint, one for each head."""
    return 0.001 + normal(seed, heads).abs() / 50


def error_bound(x: Tensor, dtype: torch.dtype, scales: Tensor) -> Tensor:
    """Most that numbers `[…, heads, head_dim]` within the codes' range may be off with these scales, in float64."""
    scales = scales.double()[..., None]
    if dtype == torch.int8:
        # Measured scales are rounded, by 2^-8 at most, so that the largest number may be past the last code's middle.
        return (0.5 + 1e-5) * scales.expand(x.shape)
    return HALF_STEP[dtype] * (1 + 1e-5) * torch.maximum(x.double().abs(), LEAST_NORMAL[dtype] * scales)


def within(x: Tensor, dtype: torch.dtype, scales: Tensor) -> Tensor:
    """Return numbers `[…, heads, head_dim]`, and in place of those beyond the codes' range its ends, in float64."""
    most = kv_entries.LARGEST[dtype] * scales.double().unsqueeze(-1)
    return x.double().clamp(-most, most)


@given(
    seeds,
    st.integers(1, 5),
    st.sampled_from([2, 10, 64]),
    st.sampled_from([*DTYPES, torch.float64]),
    codes,
    st.booleans(),
)
def test_codes_are_the_nearest(
    seed: int, heads: int, dim: int, dtype: torch.dtype, code: torch.dtype, given: bool
) -> None:
    """With measured scales, with the checkpoint's, and with 1."""
    sizes = 10.0 ** (
        8 * normal(seed, 7, heads, 1).clamp(-2, 0.5) if dtype != torch.float16 else normal(seed, 7, heads, 1)
    )
    x = (normal(seed + 1, 7, heads, dim) * sizes).to(dtype)
    own = drawn_scales(seed + 2, heads) if given else None
    stored, scales = kv_entries.quantize(x, code, own)
    found = kv_entries.dequantize(stored, scales, torch.float64)
    near = x.double()
    if kv_entries.stores_scales(code, own):
        assert scales.dtype == torch.bfloat16
        # The largest number of a head has the largest code, or the one before where the scale was rounded up.
        assert (found.abs().amax(-1) >= near.abs().amax(-1) * (1 - 2**-7)).all()
    else:
        assert (scales == (1 if own is None else own)).all()
        near = within(x, code, scales)
    assert ((found - near).abs() <= error_bound(near, code, scales)).all()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("given", [False, True])
def test_zeros_and_numbers_that_are_not_finite(code: torch.dtype, given: bool) -> None:
    x = torch.zeros(4, 2, 8)
    x[1, 0, 3], x[2, 1, 5], x[3, 1] = float("nan"), -float("inf"), 1e-33
    scales = torch.tensor([0.5, 0.25]) if given else None
    found = as_stored(x, code, scales)
    if kv_entries.stores_scales(code, scales):
        assert found[1, 0].isnan().all()
        assert found[2, 1].isnan().all()
        found[1, 0], found[2, 1] = 0, 0
    else:
        assert found[2, 1, 5] == -kv_entries.LARGEST[code] * (0.25 if given else 1)
        found[2, 1, 5] = 0
    assert not found.any()


def every_number() -> Tensor:
    """Return every bfloat16 number, also those that are not finite, float32 `[heads, 64]`."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float().view(-1, 64)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("scale", [1.0, 0.0371])
def test_the_kernel_makes_the_same_codes(code: torch.dtype, scale: float) -> None:
    """Of every bfloat16 number, by a given scale: what is too large becomes the largest code, and NaN 0."""
    x = every_number()[None].to(DEVICE)
    heads, still = x.shape[1], torch.ones(1, 1, 64, device=DEVICE)
    scales, slots = torch.full((heads,), scale, device=DEVICE), torch.tensor([1], device=DEVICE)
    kv, plain = (empty_codes(3, heads, 64, code, DEVICE, scales) for _ in range(2))
    rotary_store(x.clone(), still, 0 * still, kv, slots, 0, scales)
    rotary_store_reference.rotary_store(x.clone(), still, 0 * still, plain, slots, 0, scales)
    # The unwritten slots too.
    assert kv_entries.slots_of(kv).equal(kv_entries.slots_of(plain))
    stored = numbers_of(plain, scales)[1]
    assert stored.abs().max().item() == pytest.approx(kv_entries.LARGEST[code] * scale)
    assert not stored[x[0].isnan()].any()
    assert is_unwritten(plain[[0, 2]])


@pytest.mark.long
@given(
    seeds,
    st.integers(1, 4),
    st.sampled_from([(1, 1), (4, 2), (5, 5), (20, 4)]),
    st.sampled_from([2, 6, 16, 80]),
    st.sampled_from(DTYPES),
    codes,
    st.booleans(),
)
def test_rotary_store_equals_its_twin(
    seed: int, rows: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, code: torch.dtype, given: bool
) -> None:
    num_heads, kv_heads = heads
    qkv = normal(seed, rows, num_heads + 2 * kv_heads, dim).to(DEVICE, dtype)
    angles = normal(seed + 1, rows, 1, dim // 2).to(DEVICE)
    cos = torch.cat([angles.cos()] * 2, -1).to(dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
    slots = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:rows].to(DEVICE)
    scales = drawn_scales(seed + 2, 2 * kv_heads).to(DEVICE) if given else None
    kv, plain = (empty_codes(9, 2 * kv_heads, dim, code, DEVICE, scales) for _ in range(2))
    rotary_store(qkv.clone(), cos, sin, kv, slots, num_heads, scales)
    rotary_store_reference.rotary_store(qkv.clone(), cos, sin, plain, slots, num_heads, scales)
    found, expected = numbers_of(kv, scales), numbers_of(plain, scales)
    unused = torch.ones(9, dtype=torch.bool, device=DEVICE)
    unused[slots] = False
    assert is_unwritten(kv[unused])
    # Where a rotated key was rounded to another number, its code may be the next one.
    step = (
        2 * error_bound(expected[slots], code, scales_in(plain, scales)[slots]) + 8 * ROUNDING[dtype] * qkv.abs().max()
    )
    assert ((found - expected)[slots].abs() <= step).all()
    assert found[slots, kv_heads:].equal(expected[slots, kv_heads:])


def exact_attention(query: Tensor, numbers: Tensor, slots_seen: list[list[int]], slopes: Tensor | None) -> Tensor:
    """One row at a time over the slots that it sees, in float64."""
    keys, values = numbers.double().unflatten(1, (2, -1)).unbind(1)
    group, output = query.shape[1] // keys.shape[1], []
    for row, slots in zip(query.double(), slots_seen, strict=True):
        own_keys, own_values = (part[slots].repeat_interleave(group, 1) for part in (keys, values))
        weights = torch.softmax(torch.einsum("hd,khd->kh", row, own_keys) * SCALE + biases(slopes, len(slots)), 0)
        output.append(torch.einsum("kh,khd->hd", weights, own_values))
    return torch.stack(output)


def drawn(case: Case, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Built, Tensor, Tensor]:
    """Return a case, its query, and its keys and values, of which unwritten slots are NaN."""
    made = build(case)
    written = ~made.kv[:, 0, 0].isnan()
    numbers = torch.full((len(written), 2 * kv_heads, dim), float("nan"))
    numbers[written] = normal(case.seed, int(written.sum()), 2 * kv_heads, dim)
    query = normal(case.seed + 1, len(made.slots_seen), kv_heads * case.group, dim)
    return made, query.to(dtype), numbers.to(dtype)


def check_error(
    actual: Tensor,
    query: Tensor,
    numbers: Tensor,
    kv: Tensor,
    slots_seen: list[list[int]],
    scales: Tensor | None,
    slopes: Tensor | None,
) -> None:
    """Check a result against what the codes stand for, closely, and against the numbers by the codes' own bounds."""
    stood = numbers_of(kv, scales)
    written = ~numbers[:, 0, 0].isnan()
    largest = stood[written].abs().max()
    near = exact_attention(query, stood, slots_seen, slopes)
    # Weights and values are rounded before they are multiplied, and the result is.
    assert ((actual.double() - near).abs() <= (6 * ROUNDING[query.dtype] + 1e-5) * largest).all()
    used = scales_in(kv, scales)[written]
    numbers = numbers.double()
    numbers[written] = within(numbers[written], kv.dtype, used)
    bounds = error_bound(numbers[written], kv.dtype, used)
    keys, values = bounds.unflatten(1, (2, -1)).unbind(1)
    # Scores are off by the keys' errors times the query; weights by a factor of twice that.
    shift = SCALE * query.double().abs().sum(-1).max() * keys.max()
    bound = torch.expm1(2 * shift) * largest + values.max()
    far = exact_attention(query, numbers, slots_seen, slopes)
    assert ((near - far).abs() <= bound).all()


@pytest.mark.long
@given(
    small_cases(),
    st.integers(1, 2),
    st.sampled_from([2, 16, 80]),
    st.sampled_from([*DTYPES, torch.float64]),
    codes,
    st.booleans(),
)
def test_attention_in_torch(
    case: Case, kv_heads: int, dim: int, dtype: torch.dtype, code: torch.dtype, given: bool
) -> None:
    ROUNDING.setdefault(torch.float64, 2.0**-53)
    made, query, numbers = drawn(case, kv_heads, dim, dtype)
    scales = drawn_scales(case.seed + 2, 2 * kv_heads) if given else None
    kv, slopes = coded(numbers, code, scales), case.slopes(kv_heads)
    actual = tree_attention_reference.tree_attention(query, kv, made.rows, SCALE, case.window, slopes, scales)
    assert actual.dtype == dtype
    check_error(actual, query, numbers, kv, made.slots_seen, scales, slopes)


@pytest.mark.long
@given(small_cases(), st.integers(1, 2), st.sampled_from([16, 80]), st.sampled_from(DTYPES), codes, st.booleans())
def test_attention_in_triton(
    case: Case, kv_heads: int, dim: int, dtype: torch.dtype, code: torch.dtype, given: bool
) -> None:
    made, query, numbers = drawn(case, kv_heads, dim, dtype)
    scales = drawn_scales(case.seed + 2, 2 * kv_heads) if given else None
    kv, slopes = coded(numbers, code, scales), case.slopes(kv_heads, torch.float32)
    # Scales may lie behind the codes, so it is slots that are copied.
    there = kv_entries.kv_view(kv_entries.slots_of(kv).to(DEVICE), 2 * kv_heads, dim, code)
    given_there = [None if one is None else one.to(DEVICE) for one in (slopes, scales)]
    actual = tree_attention(query.to(DEVICE), there, on_device(made.rows), SCALE, case.window, *given_there)
    check_error(actual.cpu(), query, numbers, kv, made.slots_seen, scales, slopes)


@pytest.mark.long
@given(libraries, small_cases(), st.integers(1, 2), st.sampled_from([2, 6, 16, 64, 80]), codes, st.booleans())
def test_attention_in_the_compiled_library(
    own: Library, case: Case, kv_heads: int, dim: int, code: torch.dtype, given: bool
) -> None:
    """A row's attention has the same bits as if its path were cached."""
    made, query, numbers = drawn(case, kv_heads, dim, own.dtype)
    scales = drawn_scales(case.seed + 2, 2 * kv_heads) if given else None
    kv, slopes = coded(numbers, code, scales), case.slopes(kv_heads)
    attend = partial(NativeOperations(own).tree_attention, scale=SCALE, slopes=slopes, kv_scales=scales)
    actual = attend(query, kv, made.rows, window=case.window)
    check_error(actual, query, numbers, kv, made.slots_seen, scales, slopes)
    for row, slots in enumerate(made.slots_seen):
        path = empty_codes(len(slots) + -len(slots) % 4, 2 * kv_heads, dim, code, CPU, scales)
        kv_entries.slots_of(path)[: len(slots)] = kv_entries.slots_of(kv)[slots]
        rows = RaggedRows(
            query_lens=[1],
            lengths=[len(slots)],
            tree_starts=[len(slots)],
            block_tables=torch.arange(len(path) // 4)[None],
            visible=torch.tensor([len(slots)]),
            ancestors=torch.zeros(1, 1, dtype=torch.int64),
            block_size=4,
        )
        assert attend(query[row : row + 1], path, rows).equal(actual[row : row + 1])


def stored_by(kernels: KernelSet, kv: Tensor, scales: Tensor | None) -> Tensor:
    """Run a small float32 layer over 13 rows; return its output. The same weights and states in every call."""
    torch.manual_seed(0)
    layer = LlamaLayer(CONFIG, input_norm=True)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.requires_grad_(False)
    slots, rows = chain(0, 13)
    rotary = rotary_at(CONFIG.rope.table(CONFIG.head_dim, 80, torch.float32), slots)
    with torch.inference_mode():
        return layer.form(kernels)(
            normal(5, 13, CONFIG.hidden_size), rotary, PagedAttention(kv, slots, rows, kernels, 0, scales)
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("given", [False, True])
def test_a_layer_stores_the_codes_of_its_keys_and_values(form: str, code: torch.dtype, given: bool) -> None:
    """The compiled library's codes are those of its own float32 keys and values, and its rows read what is stored."""
    heads, dim = 2 * CONFIG.num_kv_heads, CONFIG.head_dim
    kernels = kernels_of(library(form, 2, torch.float32))
    scales = torch.linspace(0.002, 0.02, heads) if given else None
    plain = torch.full((80, heads, dim), float("nan"))
    stored_by(kernels, plain, None)
    kv = empty_codes(80, heads, dim, code, CPU, scales)
    output = stored_by(kernels, kv, scales)
    stored = kv_entries.dequantize(*kv_entries.quantize(plain[:13], code, scales), torch.float64)
    assert numbers_of(kv, scales)[:13].equal(stored)
    assert is_unwritten(kv[13:])
    twin = empty_codes(80, heads, dim, code, CPU, scales)
    expected = stored_by(TORCH, twin, scales)
    assert (output - expected).abs().max() <= 1e-2 * expected.abs().max()


def test_slots_are_whole_and_aligned() -> None:
    """Bytes of a slot: codes alone, or with two for each scale that it stores, up to a multiple of 16."""
    for heads, dim in ((2, 128), (4, 64), (16, 128)):
        size = kv_entries.slot_bytes(heads, dim, torch.int8)
        assert size == -(-heads * (dim + 2) // 16) * 16
        assert kv_entries.slot_bytes(heads, dim, torch.bfloat16) == 2 * heads * dim
        for code in CODES:
            assert kv_entries.slot_bytes(heads, dim, code, torch.ones(heads)) == heads * dim
        for code in (torch.float8_e4m3fn, torch.float8_e5m2):
            assert kv_entries.slot_bytes(heads, dim, code) == heads * dim
    # Llama 3.1 8B: 1.97 times the tokens.
    assert kv_entries.slot_bytes(16, 128, torch.int8) == 2080
