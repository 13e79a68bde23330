"""Sampling on the device: numpy's words bit for bit, its noise to a rounding, the same tokens."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.reference import gumbel_argmax as gumbel_argmax_reference
from specdec.kernels.reference import noise
from specdec.kernels.reference import perturbed_top_k as perturbed_top_k_reference
from specdec.kernels.reference.sampling import argmax
from specdec.kernels.triton.gumbel_argmax import gumbel_argmax
from specdec.kernels.triton.perturbed_top_k import MAX_K, perturbed_top_k
from specdec.kernels.triton.philox import gumbel, token_words
from specdec.kernels.types.types import NO_TOKEN, NoiseColumns, Stream
from tests.kernels.kernel_checks import DEVICE, DTYPES, huge, poisoned_outputs
from tests.profiles import num_cases
from tests.strategies import seeds

numbers = st.one_of(st.integers(0, 9), st.integers(0, 2**63 - 1), st.just(2**63 - 1))
vocabularies = st.one_of(st.integers(1, 40), st.sampled_from([1000, 1023, 1024, 1025, 2047, 2049, 3100]))
# Two logarithms of one rounding or so each, of numbers up to 22; near 0 an error of the inner one is an absolute one.
NOISE_ERROR = 3e-6


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_outputs("gumbel_argmax", "perturbed_top_k"):
        yield


@triton.jit
def noise_kernel(  # type: ignore[no-untyped-def]
    p_words, p_noise, p_keys, start, stream, lane, SIZE: tl.constexpr
):
    """Words and noise of tokens `start .. start + SIZE - 1` for the key at `p_keys`, by program."""
    i_row = tl.program_id(0)
    p_keys += 3 * i_row
    words = token_words(start, tl.load(p_keys), tl.load(p_keys + 1), tl.load(p_keys + 2), stream, lane, SIZE)
    o_token = i_row * SIZE + tl.arange(0, SIZE)
    tl.store(p_words + o_token, words)
    tl.store(p_noise + o_token, gumbel(words))


@triton.jit
def gumbel_kernel(p_words, p_noise, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    o_word = tl.arange(0, SIZE)
    tl.store(p_noise + o_word, gumbel(tl.load(p_words + o_word).to(tl.uint32)))


def kernel_noise(keys: Tensor, start: int, size: int, stream: int = 0, lane: int = 0) -> tuple[Tensor, Tensor]:
    """uint32 and float32 `[rows, size]` of int64 keys `[rows, 3]`: seed, sample index, position."""
    words = torch.zeros(len(keys), size, dtype=torch.int32, device=DEVICE)
    values = torch.full((len(keys), size), float("nan"), device=DEVICE)
    noise_kernel[(len(keys),)](words.view(torch.uint32), values, keys.to(DEVICE), start, stream, lane, SIZE=size)
    return words.cpu().view(torch.uint32), values.cpu()


def columns(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    seeds, sample_indices, positions = (part.contiguous() for part in keys.unbind(1))
    return seeds, sample_indices, positions


def numpy_words(seed: int, sample_index: int, position: int, count: int, stream: int, lane: int) -> np.ndarray:
    return np.random.Philox(counter=[0, lane, stream, position], key=[seed, sample_index]).random_raw(count)


@pytest.mark.long
@given(
    st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=3),
    st.integers(0, 20),
    st.sampled_from([8, 16, 256]),
    st.sampled_from([0, 1, 3, 2**40]),
    st.sampled_from([0, 1, 7, 2**40]),
)
@example([(2**63 - 1, 2**63 - 1, 2**63 - 1)], 20, 256, 3, 1)
def test_words_in_the_kernel_are_numpys(
    keys: list[tuple[int, int, int]], block: int, size: int, stream: int, lane: int
) -> None:
    words, _ = kernel_noise(torch.tensor(keys), 8 * block, size, stream, lane)
    for row, key in zip(words, keys, strict=True):
        expected = numpy_words(*key, 4 * block + size // 2, stream, lane).view(np.uint32)[8 * block :]
        assert (row.numpy() == expected).all()


def test_noise_equals_the_verifiers() -> None:
    keys = torch.tensor([[seed, seed % 3, 5 * seed] for seed in range(20)])
    _, ours = kernel_noise(keys, 0, 2048)
    for kernels, key in zip(ours, keys.tolist(), strict=True):
        torch.testing.assert_close(kernels[:2001], noise.gumbel(*key, 2001), rtol=4e-7, atol=4e-7)
    for stream in Stream:
        _, ours = kernel_noise(keys[:1], 0, 64, int(stream), 3)
        torch.testing.assert_close(ours[0], noise.gumbel(*keys[0].tolist(), 64, stream, 3), rtol=4e-7, atol=4e-7)


def test_noise_is_exact_to_a_rounding_for_every_size_of_word() -> None:
    """Against float64; the largest variates come from the smallest words, none is infinite."""
    words = [w for bit in range(32) for w in ((1 << bit) - 1, 1 << bit, (1 << bit) + (1 << bit) // 3)]
    words = [*words, 2**32 - 1, 2**32 - 2, 2**32 - 257, 2**31 + 2**20, *range(28)]
    given_words = torch.tensor(words)
    assert len(words) == 128
    values = torch.full((128,), float("nan"), device=DEVICE)
    gumbel_kernel[(1,)](given_words.to(DEVICE), values, SIZE=128)
    v = (given_words.float() + 0.5).mul(2.0**-32).clamp(max=1 - 2.0**-24).double()
    torch.testing.assert_close(values.cpu().double(), -(-(-v).log1p()).log(), rtol=3e-7, atol=3e-7)


def drawn_rows(
    seed: int, rows: int, vocab: int, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    """Scores with some tokens forbidden, keys, and which rows are sampled."""
    generator = torch.Generator().manual_seed(seed)
    scores = (4 * torch.randn(rows, vocab + 3, generator=generator)).to(dtype)
    scores[torch.rand(scores.shape, generator=generator) < 0.3] = float("-inf")
    keys = torch.randint(0, 2**62, (rows, 3), generator=generator)
    sampled = torch.rand(rows, generator=generator) < 0.6
    # The columns of a wider tensor.
    return scores.to(DEVICE)[:, :vocab], columns(keys.to(DEVICE)), sampled.to(DEVICE)


@pytest.mark.long
@given(seeds, st.integers(1, 4), vocabularies, st.sampled_from(DTYPES))
@example(0, 1, 128256, torch.float32)
def test_tokens_are_the_references(seed: int, rows: int, vocab: int, dtype: torch.dtype) -> None:
    """Tokens may differ only if the reference's scores of both are too close to tell apart."""
    scores, keys, sampled = drawn_rows(seed, rows, vocab, dtype)
    actual = gumbel_argmax(scores, NoiseColumns(*keys, sampled))
    expected = gumbel_argmax_reference.gumbel_argmax(scores, NoiseColumns(*keys, sampled))
    assert actual.dtype == expected.dtype
    assert torch.equal(actual[~sampled], expected[~sampled])
    assert torch.equal(actual == NO_TOKEN, expected == NO_TOKEN)
    for row in ((actual != expected) & sampled).nonzero().flatten().tolist():
        own = noise.gumbel(*(int(part[row]) for part in keys), vocab)
        perturbed = scores[row].double() + own.to(DEVICE)
        assert perturbed[expected[row]] - perturbed[actual[row]] < NOISE_ERROR


def test_only_sampled_rows_of_the_reference_have_noise() -> None:
    scores, keys, sampled = drawn_rows(3, 6, 300, torch.float32)
    vectors = [noise.gumbel(*key, 300) for key in torch.stack(list(keys), 1).tolist()]
    perturbed = scores.cpu() + torch.stack(vectors) * sampled.cpu()[:, None]
    assert torch.equal(
        gumbel_argmax_reference.gumbel_argmax(scores, NoiseColumns(*keys, sampled)).cpu(), argmax(perturbed)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_ties_unanswerable_rows_and_signed_zeros(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [
        ([1.0, 3.0, 3.0], 1),
        ([-0.0, 0.0, -1.0], 0),
        ([0.0, -0.0, -1.0], 0),
        ([-inf, -2.0, -2.0], 1),
        ([-inf, -inf, -inf], NO_TOKEN),
        ([5.0, nan, 1.0], NO_TOKEN),
        ([nan, nan, nan], NO_TOKEN),
        ([5.0, inf, 1.0], NO_TOKEN),
        ([-3e38, -3e38, -3.2e38], 0 if dtype != torch.float16 else NO_TOKEN),
    ]
    scores = torch.tensor([row for row, _ in rows]).to(DEVICE, dtype)
    # Behind 2,000 forbidden tokens, so that the second pass has its say.
    wide = torch.full((len(rows), 2003), -inf, dtype=dtype, device=DEVICE)
    wide[:, 2000:] = scores
    key = torch.zeros(len(rows), dtype=torch.int64, device=DEVICE)
    greedy = torch.zeros(len(rows), dtype=torch.bool, device=DEVICE)
    expected = [token for _, token in rows]
    assert gumbel_argmax(scores, NoiseColumns(key, key, key, greedy)).tolist() == expected
    assert gumbel_argmax(wide, NoiseColumns(key, key, key, greedy)).tolist() == [
        t if t < 0 else 2000 + t for t in expected
    ]
    unanswerable = [token == NO_TOKEN for token in expected]
    assert [t == NO_TOKEN for t in gumbel_argmax(scores, NoiseColumns(key, key, key, ~greedy)).tolist()] == unanswerable


def test_rows_beyond_two_billion_numbers() -> None:
    """The last of three rows begins at 2**31 and some; touches a few pages of 4.3 GB of address space."""
    stride, vocab = 2**30 + 8, 1100
    scores, keys, _ = drawn_rows(0, 3, vocab, torch.bfloat16)
    rows = huge(2 * stride + vocab).as_strided((3, vocab), (stride, 1))
    rows.copy_(scores)
    sampled = torch.tensor([False, True, True], device=DEVICE)
    assert torch.equal(
        gumbel_argmax(rows, NoiseColumns(*keys, sampled)), gumbel_argmax(scores, NoiseColumns(*keys, sampled))
    )
    for ours, theirs in zip(
        perturbed_top_k(rows, NoiseColumns(*keys, sampled), 3),
        perturbed_top_k(scores, NoiseColumns(*keys, sampled), 3),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.long
@given(
    seeds,
    st.integers(1, 3),
    st.one_of(vocabularies, st.just(4500)),
    st.integers(1, 12),
    st.sampled_from(DTYPES),
    st.sampled_from([(0, 0), (1, 4)]),
)
@example(0, 1, 4500, MAX_K, torch.float32, (0, 0))
@example(0, 2, 3, 3, torch.bfloat16, (0, 0))
def test_the_k_largest_are_the_references(
    seed: int, rows: int, vocab: int, k: int, dtype: torch.dtype, of: tuple[int, int]
) -> None:
    scores, keys, sampled = drawn_rows(seed, rows, vocab, dtype)
    k = min(k, vocab)
    actual = perturbed_top_k(scores, NoiseColumns(*keys, sampled), k, None, *of)
    expected = perturbed_top_k_reference.perturbed_top_k(scores, NoiseColumns(*keys, sampled), k, None, *of)
    torch.testing.assert_close(actual.scores, expected.scores, rtol=3e-7, atol=NOISE_ERROR)
    torch.testing.assert_close(actual.log_sum_exp, expected.log_sum_exp, rtol=1e-6, atol=1e-5)
    assert torch.equal(actual.tokens[~sampled], expected.tokens[~sampled])
    # Each token has the score that stands beside it, so that no order but that of near ties can differ.
    perturbed = gumbel_argmax_reference.perturbed(scores, NoiseColumns(*keys, sampled), *of)
    torch.testing.assert_close(perturbed.gather(1, actual.tokens), actual.scores, rtol=3e-7, atol=NOISE_ERROR)
    assert all(len(set(row)) == k for row in actual.tokens.tolist())


@pytest.mark.long
@settings(max_examples=num_cases(15))
@given(
    seeds,
    st.integers(1, 3),
    st.one_of(st.integers(1, 40), st.sampled_from([300, 513, 1100])),
    st.integers(1, 12),
    st.sampled_from(DTYPES),
    st.sampled_from([(0, 0), (1, 4)]),
)
@example(0, 2, 1100, MAX_K, torch.float32, (0, 0))
def test_of_some_tokens_in_any_order_each_keeps_its_own_noise(
    seed: int, rows: int, columns: int, k: int, dtype: torch.dtype, of: tuple[int, int]
) -> None:
    """The result is the twin's, and to the last bit that of the whole vocabulary with all other tokens impossible."""
    vocab = 2 * columns + 5
    scores, keys, sampled = drawn_rows(seed, rows, columns, dtype)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(vocab, generator=generator)[:columns].to(DEVICE)
    k = min(k, columns)
    actual = perturbed_top_k(scores, NoiseColumns(*keys, sampled), k, tokens, *of)
    expected = perturbed_top_k_reference.perturbed_top_k(scores, NoiseColumns(*keys, sampled), k, tokens, *of)
    full = torch.full((rows, vocab), float("-inf"), dtype=dtype, device=DEVICE)
    among_all = perturbed_top_k(
        full.scatter_(1, tokens.expand(scores.shape), scores), NoiseColumns(*keys, sampled), k, None, *of
    )
    torch.testing.assert_close(actual.scores, expected.scores, rtol=3e-7, atol=NOISE_ERROR)
    torch.testing.assert_close(actual.log_sum_exp, expected.log_sum_exp, rtol=1e-6, atol=1e-5)
    assert torch.equal(actual.tokens[~sampled], expected.tokens[~sampled])
    assert torch.equal(actual.scores, among_all.scores)
    # Where nothing more can come, the vocabulary has lower tokens to name.
    possible = actual.scores.isfinite()
    assert torch.equal(actual.tokens[possible], among_all.tokens[possible])
    assert all(len(set(row)) == k for row in actual.tokens.tolist())


def test_of_equal_scores_the_lowest_tokens_come_first_and_nan_comes_never() -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[2.0, 3.0, nan, 3.0, 2.0], [-inf, 1.0, nan, -inf, -inf]], device=DEVICE)
    key = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    found = perturbed_top_k(scores, NoiseColumns(key, key, key, torch.zeros(2, dtype=torch.bool, device=DEVICE)), 4)
    assert found.tokens.tolist() == [[1, 3, 0, 4], [1, 0, 2, 3]]
    assert found.scores.tolist() == [[3.0, 3.0, 2.0, 2.0], [1.0, -inf, -inf, -inf]]
    assert found.log_sum_exp[1] == 1
    own = torch.tensor([9, 7, 8, 5, 4], device=DEVICE)
    found = perturbed_top_k(
        scores, NoiseColumns(key, key, key, torch.zeros(2, dtype=torch.bool, device=DEVICE)), 4, own
    )
    assert found.tokens.tolist() == [[5, 7, 4, 9], [7, 4, 5, 8]]
    nothing = perturbed_top_k(
        scores[1:, 2:], NoiseColumns(*[key[:1]] * 3, torch.ones(1, dtype=torch.bool, device=DEVICE)), 2
    )
    assert nothing.tokens.tolist() == [[0, 1]]
    assert nothing.log_sum_exp.tolist() == [-inf]


def test_misfits_are_refused() -> None:
    scores, key = torch.zeros(2, 5, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    greedy = torch.zeros(2, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="float64"):
        gumbel_argmax(scores.double(), NoiseColumns(key, key, key, greedy))
    with pytest.raises(ValueError, match=r"positions \(1,\)"):
        gumbel_argmax(scores, NoiseColumns(key, key, key[:1], greedy))
    with pytest.raises(ValueError, match=r"sampled \(2,\) torch.int64"):
        gumbel_argmax(scores, NoiseColumns(key, key, key, key))
    with pytest.raises(ValueError, match="k is 6; it must be from 1 to 5"):
        perturbed_top_k(scores, NoiseColumns(key, key, key, greedy), 6)
    for tokens in (torch.arange(4), torch.arange(5, dtype=torch.int32), torch.arange(10).view(2, 5)):
        with pytest.raises(ValueError, match=r"tokens \(.* not 5 of int64 in one piece"):
            perturbed_top_k(scores, NoiseColumns(key, key, key, greedy), 2, tokens.to(DEVICE))


@pytest.mark.long
@pytest.mark.parametrize("which", [0, 1, 2], ids=["seed", "sample", "position"])
def test_noise_is_gumbel_and_independent_from_key_to_key_and_token_to_token(which: int) -> None:
    """All limits are 0.1 % points; the keys are fixed, and differ in one number by one."""
    rows, size = 250, 64
    keys = torch.tensor([[7, 0, 3]]).repeat(rows, 1)
    keys[:, which] = torch.arange(rows)
    _, values = kernel_noise(keys, 0, size)
    for sample in (values[:, 5], values[:, 62], values.flatten()):
        # Kolmogorov-Smirnov.
        n = sample.numel()
        cdf = torch.exp(-torch.exp(-sample.double().sort().values))
        grid = torch.arange(1, n + 1) / n
        statistic = max((cdf - grid).abs().max().item(), (cdf - grid + 1 / n).abs().max().item())
        assert statistic < 1.95 / math.sqrt(n)
    # Correlation of next keys, next tokens, and the two tokens that share a word.
    uniform = torch.exp(-torch.exp(-values.double())) - 0.5
    for a, b in ((uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1]), (uniform[:, ::2], uniform[:, 1::2])):
        assert abs(12 * (a * b).mean()) < 3.29 / math.sqrt(a.numel())
    # Chi-square of the tokens that are sampled, of pairs at next keys, and of pairs at next tokens.
    p = torch.tensor([0.5, 0.25, 0.2, 0.05])
    tokens = (p.log() + values.unflatten(1, (-1, 4))).argmax(-1)
    pairs = torch.outer(p, p).flatten()
    for found, law, limit in (
        (tokens, p, 16.27),
        (4 * tokens[::2] + tokens[1::2], pairs, 37.70),
        (4 * tokens[:, ::2] + tokens[:, 1::2], pairs, 37.70),
    ):
        expected = law * found.numel()
        assert ((torch.bincount(found.flatten(), minlength=len(law)) - expected) ** 2 / expected).sum() < limit
