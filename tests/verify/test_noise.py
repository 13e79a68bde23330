"""The noise is a pure function, and Gumbel distributed."""

import math

import torch

from specdec.verify.noise import GumbelNoise, gumbel


def test_is_a_function_of_its_arguments() -> None:
    noise = GumbelNoise(50, torch.device("cpu"), cache_bytes=0)
    first = noise.at(3, 0, 7).clone()
    for position in range(100):
        noise.at(3, 0, position)
    assert torch.equal(noise.at(3, 0, 7), first)
    assert torch.equal(gumbel(3, 0, 7, 50), first)


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


def test_argmax_of_log_p_plus_noise_samples_p() -> None:
    """Chi-square of 20,000 draws at the 0.1 % point of 3 degrees of freedom."""
    p = torch.tensor([0.5, 0.25, 0.2, 0.05])
    draws = torch.stack([p.log() + gumbel(1, 0, position, 4) for position in range(20_000)]).argmax(1)
    expected = p * len(draws)
    statistic = ((torch.bincount(draws, minlength=4) - expected) ** 2 / expected).sum()
    assert statistic < 16.27
