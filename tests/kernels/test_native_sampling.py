"""The compiled sampling operations and moves of cache entries against those of plain torch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from specdec.kernels.native.library import Library
from specdec.kernels.native.operations import NativeMoves, NativeOperations
from specdec.kernels.reference import kv_copy as kv_copy_reference
from specdec.kernels.reference import logit_filters as logit_filters_reference
from specdec.kernels.reference.noise import GumbelNoise, gumbel
from specdec.kernels.types.types import NoiseKey, Stream
from tests.kernels.filter_cases import UNSURE, kept_exactly, limits, scores_of
from tests.kernels.native_forms import FORMS, libraries, library, normal
from tests.strategies import seeds

pytestmark = pytest.mark.slow

keys = st.builds(NoiseKey, *(st.sampled_from([0, 1, 7, 2**63 - 1]) for _ in range(3)))


@given(
    st.integers(1, 3),
    st.one_of(st.integers(1, 150), st.just(5001)),
    st.lists(keys, min_size=1, max_size=3, unique=True),
    st.sampled_from(Stream),
    st.integers(0, 5),
)
def test_noise(threads: int, size: int, asked: list[NoiseKey], stream: Stream, lane: int) -> None:
    """The same bits in every form, and those of `gumbel` but for rounding."""
    found = torch.full((len(FORMS), len(asked), size + 1), 9.0)
    for form, own in zip(FORMS, found, strict=True):
        library(form, threads, torch.float32).noise(asked, size, stream, lane, [row.data_ptr() for row in own])
    assert all(own.equal(found[0]) for own in found[1:])
    assert (found[:, :, size] == 9.0).all()
    expected = torch.stack([gumbel(*key, size, stream, lane) for key in asked])
    torch.testing.assert_close(found[0, :, :size], expected, rtol=0, atol=2e-6)


def test_noise_of_the_extreme_variates() -> None:
    """Among two million there are words whose float32 is 2**32, and a few of the smallest and the largest variates."""
    own, size, key = library(FORMS[-1], 2, torch.float32), 2_000_000, NoiseKey(5, 0, 1)
    found = torch.empty(size)
    own.noise([key], size, Stream.TARGET, 0, [found.data_ptr()])
    torch.testing.assert_close(found, gumbel(*key, size), rtol=0, atol=2e-6)
    assert found.min() < -2.4
    assert found.max() > 12


def test_kept_noise_of_another_maker() -> None:
    """It is made once, together, and kept; all else is as with noise of torch."""
    own, calls = library(FORMS[-1], 2, torch.float32), list[list[NoiseKey]]()

    def make(given_keys: Sequence[NoiseKey], *others: Any) -> None:
        calls.append(list(given_keys))
        own.noise(given_keys, *others)

    noise = GumbelNoise(torch.device("cpu"), 0, make)
    first, second, third = (NoiseKey(3, 0, position) for position in range(3))
    addresses = noise.addresses([first, None, second, first], 40)
    assert [address == 0 for address in addresses] == [False, True, False, False]
    assert addresses[0] == addresses[3] != addresses[2]
    assert calls == [[first, second]]
    assert noise.addresses([second, third], 40)[0] == addresses[2]
    assert calls[1:] == [[third]]
    for key in (first, second, third):
        assert noise.at(key, 40).equal(noise.at(key, 40))
        torch.testing.assert_close(noise.at(key, 40), gumbel(*key, 40), rtol=0, atol=2e-6)
    assert len(calls) == 2
    assert noise.at(first, 40, Stream.DRAFT, 2).sub(gumbel(*first, 40, Stream.DRAFT, 2)).abs().max() < 2e-6


# Of a few vectors, and of more groups than are looked at to find where the largest begin.
vocabularies = st.one_of(st.integers(1, 70), st.sampled_from([999, 3100, 9001]))


@pytest.mark.long
@given(libraries, vocabularies, st.lists(limits, min_size=1, max_size=3), seeds, st.sampled_from([0.0, 0.5, 4.0]))
@example(library(FORMS[-1], 1, torch.float32), 9001, [(0.0, 0, 0.999), (0.0, 2, 0.9), (0.3, 10**6, 1.0)], 5, 4.0)
@example(library(FORMS[-1], 1, torch.float32), 9001, [(0.0, 600, 1.0), (0.0, 600, 0.999), (0.01, 600, 0.9)], 5, 0.0)
def test_filters_keep_what_is_asked(
    own: Library, vocab: int, asked: list[tuple[float, int, float]], seed: int, step: float
) -> None:
    scores, table = scores_of(len(asked), vocab, seed, step), torch.tensor(asked, dtype=torch.float32)
    found = NativeOperations(own).filter_logits(scores.clone(), table)
    for row, given_row, bounds in zip(scores, found, asked, strict=True):
        kept = given_row > float("-inf")
        assert torch.equal(given_row[kept], row[kept])
        least, most = (kept_exactly(row, *bounds, slack) for slack in (-UNSURE, UNSURE))
        assert least <= set(kept.nonzero()[:, 0].tolist()) <= most


@given(libraries, st.integers(1, 300), st.lists(limits, min_size=1, max_size=3), seeds, st.floats(0, 0.9))
def test_filters_keep_what_the_reference_keeps(
    own: Library, vocab: int, asked: list[tuple[float, int, float]], seed: int, gone: float
) -> None:
    """Where all weights are 1, so that no rounding of theirs decides."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.zeros(len(asked), vocab).masked_fill(
        torch.rand(len(asked), vocab, generator=generator) < gone, float("-inf")
    )
    scores[:, seed % vocab] = -0.0
    table = torch.tensor(asked, dtype=torch.float32)
    expected = logit_filters_reference.filter_logits(scores.clone(), table)
    assert NativeOperations(own).filter_logits(scores, table).equal(expected)


@given(libraries, vocabularies, limits, seeds)
def test_a_row_is_filtered_the_same_whatever_runs_beside_it(
    own: Library, vocab: int, asked: tuple[float, int, float], seed: int
) -> None:
    """So are rows that lie in a wider tensor, whose other columns stay as they are."""
    operations = NativeOperations(own)
    scores = scores_of(40, vocab, seed, 0.0)
    table = torch.tensor([asked, (0.0, 1, 1.0), asked, (0.0, 0, 1.0)], dtype=torch.float32).repeat(10, 1)
    together = operations.filter_logits(scores.clone(), table)
    alone = NativeOperations(library(own.form, 1, own.dtype)).filter_logits(scores[38:39].clone(), table[2:3])
    assert together[38:39].equal(alone)
    assert together[39].equal(scores[39])
    wide = torch.cat([scores, scores[:, :1]], 1)
    assert operations.filter_logits(wide[:, :vocab], table).equal(together)
    assert wide[:, :vocab].equal(together)
    assert wide[:, vocab].equal(scores[:, 0])


@given(libraries, st.integers(1, 70), limits, st.sampled_from([float("nan"), float("inf")]), st.data())
def test_a_row_that_is_not_finite_stays_so(
    own: Library, vocab: int, asked: tuple[float, int, float], spoilt: float, data: st.DataObject
) -> None:
    """So the sampler says that no token can follow, and only for that row."""
    scores = scores_of(3, vocab, 1, 0.0)
    scores[1, data.draw(st.integers(0, vocab - 1))], scores[2] = spoilt, float("-inf")
    operations, table = NativeOperations(own), torch.tensor([asked] * 3, dtype=torch.float32)
    found = operations.filter_logits(scores.clone(), table)
    assert not found[1].amax().isfinite()
    assert not found[2].isfinite().any()
    assert found[:1].equal(operations.filter_logits(scores[:1].clone(), table[:1]))


@given(
    libraries,
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6, unique_by=lambda m: m[1]),
)
def test_moves(own: Library, moves: list[tuple[int, int]]) -> None:
    kv = normal(1, 3, 10, 2, 8).to(own.dtype)
    source, target = (torch.tensor(slots) for slots in zip(*moves, strict=True))
    expected = kv.clone()
    kv_copy_reference.move_kv(expected, source, target)
    features, others = kv[1].clone(), expected[1]
    NativeMoves(own, [kv, features[None]])(source.tolist(), target.tolist())
    assert kv.equal(expected)
    assert features.equal(others)
