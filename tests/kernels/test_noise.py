"""The noise is a pure function, and Gumbel distributed."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specdec.kernels.reference.noise import GumbelNoise, gumbel, uniforms
from specdec.kernels.types.types import NoiseKey, Stream


def test_is_a_function_of_its_arguments() -> None:
    noise = GumbelNoise(torch.device("cpu"), cache_bytes=0)
    first = noise.at(NoiseKey(3, 0, 7), 50).clone()
    for position in range(100):
        noise.at(NoiseKey(3, 0, position), 50)
    assert torch.equal(noise.at(NoiseKey(3, 0, 7), 50), first)
    assert torch.equal(gumbel(3, 0, 7, 50), first)


def test_kept_noise_serves_vocabularies_of_any_size() -> None:
    noise = GumbelNoise(torch.device("cpu"), cache_bytes=0)
    for size in (20, 50, 33, 50, 64):
        assert torch.equal(noise.at(NoiseKey(3, 0, 7), size), gumbel(3, 0, 7, size))
    for position in range(100):
        noise.at(NoiseKey(3, 0, position), 9)
    assert torch.equal(noise.at(NoiseKey(3, 0, 7), 64), gumbel(3, 0, 7, 64))


def test_differs_by_seed_sample_and_position() -> None:
    vectors = [gumbel(*key, 64) for key in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 0), (2**63 - 1, 0, 0)]]
    for i, a in enumerate(vectors):
        for b in vectors[:i]:
            assert not torch.equal(a, b)
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.6


def test_longer_vocabulary_extends_the_same_draw() -> None:
    assert torch.equal(gumbel(5, 0, 2, 33), gumbel(5, 0, 2, 100)[:33])


def test_has_the_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)), and no infinities."""
    draws = torch.cat([gumbel(9, 0, position, 1000) for position in range(200)]).double().sort().values
    assert torch.isfinite(draws).all()
    n = len(draws)
    cdf = torch.exp(-torch.exp(-draws))
    grid = torch.arange(1, n + 1, dtype=torch.float64) / n
    statistic = max((cdf - grid).abs().max().item(), (cdf - (grid - 1 / n)).abs().max().item())
    # 1.95 / sqrt(n) is the 0.1 % point.
    assert statistic < 1.95 / math.sqrt(n)


@pytest.mark.long
def test_argmax_of_log_p_plus_noise_samples_p() -> None:
    """Chi-square of 20,000 draws at the 0.1 % point of 3 degrees of freedom."""
    p = torch.tensor([0.5, 0.25, 0.2, 0.05])
    draws = torch.stack([p.log() + gumbel(1, 0, position, 4) for position in range(20_000)]).argmax(1)
    expected = p * len(draws)
    statistic = ((torch.bincount(draws, minlength=4) - expected) ** 2 / expected).sum()
    assert statistic < 16.27


def test_streams_and_lanes_are_independent_and_kept_apart() -> None:
    noise = GumbelNoise(torch.device("cpu"))
    keys = [(stream, lane) for stream in Stream for lane in (0, 1, 5)]
    vectors = [noise.at(NoiseKey(3, 0, 7), 64, *key) for key in keys]
    assert torch.equal(vectors[0], gumbel(3, 0, 7, 64))
    for i, a in enumerate(vectors):
        assert torch.equal(a, noise.at(NoiseKey(3, 0, 7), 64, *keys[i]))
        for b in vectors[:i]:
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.6


def test_uniforms_are_a_function_of_their_arguments() -> None:
    assert uniforms(3, 0, 7, 20) == uniforms(3, 0, 7, 20, Stream.COIN)
    assert uniforms(3, 0, 7, 50)[:20] == uniforms(3, 0, 7, 20)
    assert uniforms(3, 0, 7, 0) == []


def test_uniforms_differ_by_seed_sample_position_and_stream() -> None:
    keys = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 0), (2**63 - 1, 0, 0)]
    values = [value for key in keys for stream in Stream for value in uniforms(*key, 50, stream)]
    assert len(set(values)) == len(values)


@pytest.mark.long
def test_uniforms_have_the_uniform_distribution() -> None:
    """Kolmogorov-Smirnov at the 0.1 % point, over positions as over the values of one."""
    for values in (
        uniforms(5, 0, 0, 50_000),
        [uniforms(5, 0, position, 1)[0] for position in range(20_000)],
    ):
        n = len(values)
        statistic = max(max((i + 1) / n - u, u - i / n) for i, u in enumerate(sorted(values)))
        assert statistic < 1.95 / math.sqrt(n)


def fixed_words(word: int) -> Callable[..., Any]:
    """Return a replacement of the generator that yields only `word`."""

    class Fixed:
        @staticmethod
        def random_raw(count: int) -> Any:
            return np.full(count, word, dtype=np.uint64)

    return lambda *_: Fixed


@pytest.mark.parametrize(("word", "value"), [(2**64 - 1, 1 - 2.0**-53), (2**11, 2.0**-53), (2**11 - 1, 0.0)])
def test_uniforms_are_below_one_for_the_largest_word(monkeypatch: pytest.MonkeyPatch, word: int, value: float) -> None:
    monkeypatch.setattr("specdec.kernels.reference.noise._philox", fixed_words(word))
    assert uniforms(0, 0, 0, 3) == [value] * 3


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_gumbel_is_finite_for_the_extreme_words(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    monkeypatch.setattr("specdec.kernels.reference.noise._philox", fixed_words(word))
    assert torch.isfinite(gumbel(0, 0, 0, 4)).all()


def test_places_that_are_used_again_hold_what_was_asked_last() -> None:
    """More than are kept, the first of them asked for once more."""
    noise = GumbelNoise(torch.device("cpu"), cache_bytes=0)
    for position in (*range(70), *range(3)):
        key = NoiseKey(9, 0, position)
        assert torch.equal(noise.at(key, 1 << 12), gumbel(*key, 1 << 12))


def test_kept_noise_takes_no_more_memory_than_asked() -> None:
    noise = GumbelNoise(torch.device("cpu"), cache_bytes=4000 * 100)
    first = noise.at(NoiseKey(1, 0, 0), 1000)
    place = first.data_ptr()
    assert noise.at(NoiseKey(1, 0, 0), 1000).data_ptr() == place
    places = {noise.at(NoiseKey(1, 0, position), 1000).data_ptr() for position in range(1, 500)}
    assert len(places) == 100
    assert torch.equal(noise.at(NoiseKey(1, 0, 0), 1000), gumbel(1, 0, 0, 1000))
