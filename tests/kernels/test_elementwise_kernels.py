"""Norms, activation and rotary store against float64 and against plain torch."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.reference import elementwise as elementwise_reference
from specdec.kernels.reference import rotary_store as rotary_store_reference
from specdec.kernels.triton.elementwise import add_rms_norm, rms_norm, silu_and_mul
from specdec.kernels.triton.rotary_store import rotary_store
from specdec.kernels.types.types import HeadNorms
from tests.kernels.kernel_checks import DEVICE, DTYPES, assert_as_exact, huge, poisoned_outputs
from tests.strategies import seeds

dtypes = st.sampled_from(DTYPES)
sizes = st.one_of(st.integers(1, 70), st.sampled_from([100, 128, 255, 256, 257, 1000, 1500]))
EPS = 1e-5


@pytest.fixture(autouse=True, scope="module")
def nan_outputs() -> Iterator[None]:
    with poisoned_outputs("elementwise", "rotary_store"):
        yield


def drawn(seed: int, *shape: int, dtype: torch.dtype, spare: int = 0) -> Tensor:
    """Return normal numbers; with `spare`, columns of a tensor that is wider by `spare` columns of NaN."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    wide = torch.full((*shape[:-1], shape[-1] + spare), float("nan"), dtype=dtype, device=DEVICE)
    wide[..., : shape[-1]] = numbers
    return wide[..., : shape[-1]]


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = x.double(), weight.double()
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


@given(seeds, st.integers(1, 4), sizes, st.integers(0, 3), dtypes, st.sampled_from([64, 8192]))
@example(0, 2, 4096, 0, torch.bfloat16, 8192)
@example(0, 1, 8193, 0, torch.bfloat16, 8192)
def test_rms_norm_equals_its_formula(
    seed: int, rows: int, hidden: int, spare: int, dtype: torch.dtype, block: int
) -> None:
    """Rows longer than a block of 64 take the kernel's loop."""
    x = drawn(seed, rows, hidden, dtype=dtype, spare=spare)
    weight = drawn(seed + 1, hidden, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.kernels.triton.elementwise.MAX_BLOCK", block)
        actual = rms_norm(x, weight, EPS)
    assert_as_exact(actual, elementwise_reference.rms_norm(x, weight, EPS), exact_norm(x, weight))


@pytest.mark.long
@given(seeds, st.integers(1, 4), sizes, st.integers(0, 3), dtypes, st.sampled_from([64, 8192]))
def test_add_rms_norm_is_addition_then_norm(
    seed: int, rows: int, hidden: int, spare: int, dtype: torch.dtype, block: int
) -> None:
    x, residual = (drawn(seed + i, rows, hidden, dtype=dtype, spare=spare * i) for i in range(2))
    weight = drawn(seed + 2, hidden, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.kernels.triton.elementwise.MAX_BLOCK", block)
        normed, total = add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(normed, rms_norm(total, weight, EPS))
    plain_normed, plain_total = elementwise_reference.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, plain_total)
    assert_as_exact(normed, plain_normed, exact_norm(total, weight))


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e4])
def test_rms_norm_of_small_and_large_rows(scale: float) -> None:
    x = scale * drawn(0, 3, 100, dtype=torch.bfloat16)
    weight = drawn(1, 100, dtype=torch.bfloat16)
    assert_as_exact(rms_norm(x, weight, EPS), elementwise_reference.rms_norm(x, weight, EPS), exact_norm(x, weight))


@given(seeds, st.integers(1, 3), st.one_of(sizes, st.just(2049)), st.integers(0, 3), dtypes)
def test_silu_and_mul_equals_its_formula(seed: int, rows: int, size: int, spare: int, dtype: torch.dtype) -> None:
    gate_up = 4 * drawn(seed, rows, 2 * size, dtype=dtype, spare=spare)
    gate, up = gate_up.double().chunk(2, -1)
    exact = gate / (1 + (-gate).exp()) * up
    assert_as_exact(silu_and_mul(gate_up), elementwise_reference.silu_and_mul(gate_up), exact)


def test_silu_of_large_gates_is_the_gate_or_nothing() -> None:
    gates = torch.tensor([1e4, 100.0, -100.0, -1e4, 0.0], device=DEVICE)
    actual = silu_and_mul(torch.cat([gates, torch.ones_like(gates)])[None])
    torch.testing.assert_close(actual, gates.clamp(min=0)[None], rtol=0, atol=1e-30)


@pytest.mark.long
@given(
    seeds,
    st.integers(1, 4),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (5, 5), (32, 8), (20, 4)]),
    st.sampled_from([2, 6, 16, 64, 80, 128]),
    dtypes,
    st.booleans(),
)
@example(0, 2, (3, 1), 256, torch.bfloat16, True)
def test_rotary_store_equals_rotation_and_store(
    seed: int, rows: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, wide: bool
) -> None:
    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(seed)
    qkv = drawn(seed, rows, (num_heads + 2 * kv_heads) * dim, dtype=dtype, spare=3 * wide)
    qkv = qkv.unflatten(1, (-1, dim))
    angles = 100 * torch.randn(rows, dim // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    # As in the table of `rope`, the cosines of a row lie beside its sines.
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)[:, :, None].to(DEVICE, dtype)
    rotary = table.unbind(1)
    slots = torch.randperm(9, generator=generator)[:rows].to(DEVICE)
    kv = torch.full((9, 2 * kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    plain_kv = kv.clone()

    exact = qkv.double()
    turned = exact[:, : num_heads + kv_heads]
    exact = torch.cat([rotary_store_reference.rotate_(turned.clone(), *(part.double() for part in rotary)), exact], 1)
    values = qkv[:, -kv_heads:].clone()
    query = rotary_store(qkv, *rotary, kv, slots, num_heads)
    plain_query = rotary_store_reference.rotary_store(qkv.clone(), *rotary, plain_kv, slots, num_heads)

    assert_as_exact(query, plain_query, exact[:, :num_heads])
    keys = exact[:, num_heads : num_heads + kv_heads]
    assert_as_exact(kv[slots, :kv_heads], plain_kv[slots, :kv_heads], keys)
    assert torch.equal(kv[slots, kv_heads:], values)
    unused = torch.ones(9, dtype=torch.bool, device=DEVICE)
    unused[slots] = False
    assert kv[unused].isnan().all()


@pytest.mark.long
@given(
    seeds,
    st.integers(1, 4),
    st.sampled_from([(1, 1), (4, 2), (5, 5), (32, 8), (20, 4)]),
    st.sampled_from([2, 6, 64, 80, 128]),
    dtypes,
    st.booleans(),
)
@example(0, 2, (3, 1), 256, torch.bfloat16, True)
def test_rotary_store_norms_each_query_and_key_first(
    seed: int, rows: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, wide: bool
) -> None:
    num_heads, kv_heads = heads
    qkv = drawn(seed, rows, (num_heads + 2 * kv_heads) * dim, dtype=dtype, spare=3 * wide).unflatten(1, (-1, dim))
    norms = HeadNorms(*(drawn(seed + place, dim, dtype=dtype) for place in (1, 2)), EPS)
    slots = torch.arange(rows, device=DEVICE)
    kv = torch.full((rows, 2 * kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    plain_kv = kv.clone()
    queries, keys = slice(0, num_heads), slice(num_heads, num_heads + kv_heads)
    # Angles of 0 show the norms alone.
    one = torch.ones(rows, 1, dim, dtype=dtype, device=DEVICE)
    query = rotary_store(qkv, one, 0 * one, kv, slots, num_heads, None, norms)
    plain = rotary_store_reference.rotary_store(qkv.clone(), one, 0 * one, plain_kv, slots, num_heads, None, norms)
    assert_as_exact(query, plain, exact_norm(qkv[:, queries], norms.query))
    assert_as_exact(kv[:, :kv_heads], plain_kv[:, :kv_heads], exact_norm(qkv[:, keys], norms.key))
    assert torch.equal(kv[:, kv_heads:], qkv[:, keys.stop :])
    # Others turn what was normed: the same as normed heads that are rotated without norms.
    angles = 100 * torch.randn(rows, 1, dim // 2, generator=torch.Generator().manual_seed(seed))
    cos, sin = (part.to(DEVICE, dtype) for part in (angles.cos(), angles.sin()))
    rotary = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    turned, turned_kv = kv.clone(), kv.clone()
    found = rotary_store(qkv, *rotary, turned, slots, num_heads, None, norms)
    wanted = rotary_store(torch.cat([query, kv], 1), *rotary, turned_kv, slots, num_heads)
    assert torch.equal(found, wanted)
    assert torch.equal(turned, turned_kv)


def test_rows_and_slots_beyond_two_billion_numbers() -> None:
    """The last of three rows, and a slot, begins at 2**31 and some; touches a few pages of 4.3 GB."""
    stride, size = 2**30 + 256, 256
    memory = huge(2 * stride + size)
    rows = memory.as_strided((3, size), (stride, 1))
    rows.copy_(drawn(0, 3, size, dtype=torch.bfloat16))
    near = rows.clone()
    weight = drawn(1, size, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(rows, weight, EPS), rms_norm(near, weight, EPS))
    normed, total = add_rms_norm(near, rows, weight, EPS)
    assert torch.equal(total, 2 * near)
    assert torch.equal(normed, rms_norm(2 * near, weight, EPS))
    assert torch.equal(silu_and_mul(rows), silu_and_mul(near))

    cos = torch.ones(3, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    qkv = drawn(2, 3, 3, 128, dtype=torch.bfloat16)
    slots = torch.arange(3, device=DEVICE) * (stride // size)
    rotary_store(qkv.clone(), cos, 0 * cos, memory.view(-1, 2, 128), slots, 1)
    assert torch.equal(rows, qkv[:, 1:].flatten(1))
    near_kv = torch.empty(3, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    turns, slots = cos[..., :64], torch.arange(3, device=DEVICE)
    rotary_store(memory.as_strided((3, 3, 64), (stride, 64, 1)), turns, 0 * turns, near_kv, slots, 1)
    assert torch.equal(near_kv.flatten(1), rows[:, 64:192])


def test_misfits_are_refused() -> None:
    x, weight = torch.zeros(2, 6, device=DEVICE), torch.zeros(6, device=DEVICE)
    with pytest.raises(ValueError, match=r"x \(2, 6\).* weight \(5,\)"):
        rms_norm(x, weight[:5], EPS)
    with pytest.raises(ValueError, match="float64"):
        rms_norm(x.double(), weight.double(), EPS)
    with pytest.raises(ValueError, match="must end in 1"):
        add_rms_norm(x, torch.zeros(6, 2, device=DEVICE).T, weight, EPS)
    with pytest.raises(ValueError, match=r"\(2, 5\)"):
        silu_and_mul(x[:, :5])
    qkv, kv = torch.zeros(2, 4, 8, device=DEVICE), torch.zeros(3, 2, 8, device=DEVICE)
    cos, slots = torch.zeros(2, 1, 8, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="3 query heads"):
        rotary_store(qkv, cos, cos, kv, slots, 3)
    with pytest.raises(ValueError, match=r"slots \(1,\)"):
        rotary_store(qkv, cos, cos, kv, slots[:1], 2)
    with pytest.raises(ValueError, match=r"norms \['\(6,\) of .* do not fit heads of 8 numbers"):
        rotary_store(qkv, cos, cos, kv, slots, 2, None, HeadNorms(weight, weight, EPS))
    with pytest.raises(ValueError, match="int32"):
        rotary_store(qkv, cos, cos, kv, slots.int(), 2)
    with pytest.raises(ValueError, match="not in one piece"):
        rotary_store(qkv, cos, cos, kv, slots.repeat(2)[::2], 2)


def test_no_rows_are_no_launch() -> None:
    x, weight = torch.zeros(0, 6, device=DEVICE), torch.zeros(6, device=DEVICE)
    assert rms_norm(x, weight, EPS).shape == (0, 6)
    assert silu_and_mul(x).shape == (0, 3)
