"""The plain-torch kernels against loops over rows and visible entries in float64."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from specdec.kernels.reference.elementwise import rms_norm, silu_and_mul
from specdec.kernels.reference.kv_copy import move_kv
from specdec.kernels.reference.rotary_store import rotary_store, rotate_
from specdec.kernels.reference.tree_attention import attend, attend_generic, merge, tree_attention
from specdec.kernels.types.ragged_rows import MASKED_KEYS, TILE_ROWS
from specdec.kernels.types.tree import DraftTree
from tests.kernels.attention_cases import DIM, KV_HEADS, Built, Case, Part, biases, build, star, windows
from tests.strategies import draft_trees, seeds

pytestmark = pytest.mark.slow

EMPTY = DraftTree()


@st.composite
def parts(draw: st.DrawFn, first: int) -> Part:
    cached = draw(st.one_of(st.integers(first, 40), st.integers(MASKED_KEYS - 100, MASKED_KEYS + 100)))
    tree = draw(draft_trees(max_nodes=130, vocab_size=50))
    if tree and cached > first and draw(st.booleans()):
        # A level of a tree that is being drafted: the levels above it are in the cache already.
        return Part(cached, 0, tree, draw(st.integers(1, len(tree))))
    return Part(cached, draw(st.one_of(st.integers(1, 8), st.integers(120, 300))), tree, len(tree))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    first = draw(st.integers(0, 1))
    requests = draw(st.lists(parts(first), min_size=1, max_size=4))
    return Case(
        requests,
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([8, 16])),
        first,
        draw(seeds),
        draw(windows(requests)),
        draw(st.booleans()),
    )


def naive_attention(built: Built, scale: float, slopes: Tensor | None) -> Tensor:
    """One row at a time: softmax over the keys that it sees, in float64."""
    kv = built.kv.double().unflatten(1, (2, KV_HEADS))
    group = built.query.shape[1] // KV_HEADS
    output = []
    for query, slots in zip(built.query.double(), built.slots_seen, strict=True):
        keys, values = kv[slots].repeat_interleave(group, dim=2).unbind(1)
        scores = torch.einsum("hd,khd->kh", query, keys) * scale + biases(slopes, len(slots))
        weights = torch.softmax(scores, 0)
        output.append(torch.einsum("kh,khd->hd", weights, values))
    return torch.stack(output)


@pytest.mark.long
@given(cases())
@example(Case([Part(5, 1, star(TILE_ROWS), TILE_ROWS)], 2, 8, 0, 0))
@example(Case([Part(5, 0, star(4), 1)], 2, 8, 1, 0))
@example(Case([Part(3, TILE_ROWS, star(1), 1), Part(0, 1, EMPTY, 0)], 1, 16, 0, 0))
@example(Case([Part(0, 1, EMPTY, 0)], 1, 8, 0, 0))
@example(Case([Part(700, TILE_ROWS + 3, star(4), 4), Part(9, 1, star(2), 2)], 2, 8, 0, 0, window=600))
@example(Case([Part(1300, 1, star(4), 4), Part(1290, 9, star(2), 2)], 2, 8, 0, 0, alibi=True))
@example(Case([Part(1300, 1, EMPTY, 0)], 2, 8, 0, 0, alibi=True))
def test_tree_attention_equals_loop_over_rows(case: Case) -> None:
    built, slopes = build(case), case.slopes(KV_HEADS)
    actual = tree_attention(built.query, built.kv, built.rows, 0.7, case.window, slopes)
    torch.testing.assert_close(actual, naive_attention(built, 0.7, slopes), rtol=1e-12, atol=1e-13)


@pytest.mark.long
@given(cases(), st.sampled_from([(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]))
def test_tree_attention_in_low_precision_rounds_thrice(case: Case, precision: tuple[torch.dtype, float]) -> None:
    """Once the weights, once the output, once more where two parts are merged; scores and sums not at all.

    A rounding to bfloat16 is off by up to 2^-8 of the number, half of the last of its 8 bits.
    """
    dtype, eps = precision
    # So large that the rounding of scores would show.
    scale = 4.4
    built = build(case)
    built = built._replace(query=built.query.to(dtype), kv=built.kv.to(dtype))
    slopes = case.slopes(KV_HEADS, torch.float32)
    actual = tree_attention(built.query, built.kv, built.rows, scale, case.window, slopes)
    assert actual.dtype == dtype
    error = (actual.double() - naive_attention(built, scale, slopes)).abs()
    sizes = built._replace(kv=torch.cat([built.kv[:, :KV_HEADS], built.kv[:, KV_HEADS:].abs()], 1))
    # Beside that, small weights of many keys are subnormal in float16.
    assert (error <= 3 * eps * naive_attention(sizes, scale, slopes) + 1e-4).all()


@pytest.mark.parametrize("masked", [False, True])
def test_attention_without_the_cpu_kernel_is_the_same(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64, generator=generator)
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill_(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    fused = attend(q, k, v, mask if masked else None, 0.3)
    generic = attend_generic(q, k, v, mask if masked else None, 0.3)
    for ours, theirs in zip(generic, fused, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@given(seeds, st.integers(1, 9))
def test_merged_attention_equals_attention_over_all_keys(seed: int, at: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 2, 10, 8, dtype=torch.float64, generator=generator)
    parts = (attend(q, k[:, :, part], v[:, :, part], None, 0.3) for part in (slice(at), slice(at, None)))
    torch.testing.assert_close(merge(*parts), attend(q, k, v, None, 0.3).output, rtol=1e-12, atol=1e-13)


@pytest.mark.long
@given(cases())
def test_tree_attention_twice_over_the_same_rows_is_the_same(case: Case) -> None:
    built = build(case)
    once = tree_attention(built.query, built.kv, built.rows, 1.0, case.window)
    assert torch.equal(once, tree_attention(built.query, built.kv, built.rows, 1.0, case.window))


@given(seeds, st.integers(1, 20))
def test_rotary_store_writes_its_slots_and_no_others(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(32, 2 * KV_HEADS, DIM, generator=generator)
    slots = torch.randperm(32, generator=generator)[:count]
    key_value = torch.randn(count, 2 * KV_HEADS, DIM, generator=generator)
    expected = kv.clone()
    for i, slot in enumerate(slots.tolist()):
        expected[slot] = key_value[i]
    queries, still = torch.randn(count, 3, DIM, generator=generator), torch.ones(count, 1, DIM)
    query = rotary_store(torch.cat([queries, key_value], 1), still, 0 * still, kv, slots, 3)
    assert torch.equal(kv, expected)
    assert torch.equal(query, queries)


@given(seeds, st.integers(0, 12))
def test_overlapping_moves_equal_copying_all_before_writing_any(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(3, 16, 2 * KV_HEADS, DIM, generator=generator)
    source = torch.randint(0, 16, (count,), generator=generator)
    target = torch.randperm(16, generator=generator)[:count]
    before, expected = kv.clone(), kv.clone()
    for old, new in zip(source.tolist(), target.tolist(), strict=True):
        expected[:, new] = before[:, old]
    move_kv(kv, source, target)
    assert torch.equal(kv, expected)


@given(seeds, st.integers(1, 5), st.sampled_from([8, 33]))
def test_rms_norm_in_float64_equals_transformers_exactly(seed: int, rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    norm = LlamaRMSNorm(size, eps=1e-5).double()
    norm.weight.data.normal_(generator=generator)
    x = torch.randn(rows, size, dtype=torch.float64, generator=generator)
    assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_rms_norm_in_low_precision_is_within_two_roundings_of_its_formula(dtype: torch.dtype, eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(50, 32, generator=generator)).to(dtype)
    weight = torch.randn(32, generator=generator).to(dtype)
    exact = weight.double() * x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, 1e-3).double(), exact, rtol=eps, atol=1e-7)


@given(seeds, st.integers(1, 6), st.sampled_from([2, 8, 16]))
def test_rotate_equals_transformers(seed: int, rows: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, dim, dtype=torch.float64, generator=generator)
    angles = 100 * torch.randn(rows, dim // 2, dtype=torch.float64, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    rotary = (torch.cat(pair, -1)[:, None] for pair in ((cos, cos), (-sin, sin)))
    both = (torch.cat([part, part], -1)[None] for part in (cos, sin))
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *both)
    torch.testing.assert_close(rotate_(x, *rotary), expected[0].transpose(0, 1), rtol=1e-14, atol=1e-14)


def test_silu_and_mul_equals_its_formula() -> None:
    gate, up = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_and_mul(torch.cat([gate, up], -1)), expected, rtol=1e-14, atol=1e-14)


def test_norms_in_float64_do_not_depend_on_the_last_bits_of_a_sum() -> None:
    """Half way between two numbers of float32, to which the norm rounds, as transformers' does."""
    generator = torch.Generator().manual_seed(0)
    single = torch.randn(50, 32, generator=generator)
    x = (single.double() + single.nextafter(torch.tensor(torch.inf)).double()) / 2
    weight = torch.ones(32, dtype=torch.float64)
    expected = rms_norm(x, weight, 1e-5)
    for error in (-1e-15, 1e-15):
        assert rms_norm(x * (1 + error), weight, 1e-5).equal(expected)
    # As transformers rounds all others.
    single = torch.randn(50, 32, dtype=torch.float64, generator=generator).float()
    expected = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + 1e-5)
    for near in (single.double() * (1 + 1e-8), single.double()):
        assert rms_norm(near, weight, 1e-5).equal(expected.double())
