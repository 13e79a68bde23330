"""Coins and draws are functions of their key, and no two keys share one."""

import math

import pytest
import torch

from specdec.kernels.reference.noise import uniforms
from specdec.kernels.types.types import NoiseKey, Stream
from specdec.verify.chance import PhiloxChance


def chance_of(seed: int, sample_index: int, position: int) -> PhiloxChance:
    return PhiloxChance(NoiseKey(seed, sample_index, position))


def coin(chance: PhiloxChance, depth: int, rank: int) -> float:
    """Return the coin itself, by bisection of the probabilities it accepts; it is a multiple of 2^-53."""
    low, high = 0, 2**53
    while high - low > 1:
        middle = (low + high) // 2
        if chance.accept(depth, rank, middle * 2.0**-53):
            high = middle
        else:
            low = middle
    return low * 2.0**-53


def test_coins_are_functions_of_their_key_whatever_was_asked_before() -> None:
    keys = [(depth, rank) for depth in range(9) for rank in range(9)]
    one, other = chance_of(3, 1, 20), chance_of(3, 1, 20)
    forwards = {key: coin(one, *key) for key in keys}
    backwards = {key: coin(other, *key) for key in reversed(keys)}
    assert forwards == backwards
    assert {key: coin(one, *key) for key in keys} == forwards


def test_coins_differ_by_seed_sample_position_depth_and_rank() -> None:
    coins = [
        coin(chance_of(seed, sample, position), depth, rank)
        for seed in (1, 2)
        for sample in (0, 1)
        for position in (5, 6, 7)
        for depth in range(5)
        for rank in range(5)
    ]
    assert len(set(coins)) == len(coins)


def test_a_later_step_does_not_see_the_coins_of_the_positions_again() -> None:
    earlier = {coin(chance_of(1, 0, 4), depth, 0) for depth in range(8)}
    later = {coin(chance_of(1, 0, start), depth, 0) for start in range(5, 12) for depth in range(8)}
    assert not earlier & later


def test_coins_are_their_streams_uniforms() -> None:
    streams = {stream: set(uniforms(7, 0, 2, 64, stream)) for stream in Stream}
    asked = {coin(chance_of(7, 0, 2), depth, rank) for depth in range(4) for rank in range(4)}
    assert asked <= streams[Stream.COIN]
    assert not asked & streams[Stream.DRAFT]


def test_coins_are_uniform() -> None:
    """Kolmogorov-Smirnov at the 0.1 % point."""
    coins = sorted(
        coin(chance_of(11, 0, position), depth, rank)
        for position in range(100)
        for depth in range(4)
        for rank in range(4)
    )
    n = len(coins)
    statistic = max(max((i + 1) / n - u, u - i / n) for i, u in enumerate(coins))
    assert statistic < 1.95 / math.sqrt(n)


def test_certain_and_impossible() -> None:
    for position in range(50):
        chance = chance_of(0, 0, position)
        assert all(chance.accept(depth, 0, 1.0) and chance.accept(depth, 1, torch.tensor(7.0)) for depth in range(20))
        assert not any(chance.accept(depth, 0, 0.0) for depth in range(20))


def test_draw_inverts_the_distribution_at_the_residual_streams_uniform() -> None:
    weights = torch.tensor([0.2, 0.0, 0.5, 0.1], dtype=torch.float64)
    drawn = set()
    for depth in range(60):
        token = chance_of(5, 2, 10).draw(depth, weights)
        (u,) = uniforms(5, 2, 10 + depth, 1, Stream.RESIDUAL)
        assert token == (0 if u < 0.25 else 2 if u < 0.875 else 3)
        assert token == chance_of(5, 2, 10).draw(depth, weights * 0.3)
        drawn.add(token)
    assert drawn == {0, 2, 3}


def test_the_last_possible_token_is_drawn_where_rounding_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.verify.chance.uniforms", lambda *_: [1.0])
    assert chance_of(0, 0, 0).draw(0, torch.tensor([0.0, 0.7, 0.1, 0.0])) == 2


@pytest.mark.long
def test_draws_follow_their_weights() -> None:
    """Chi-square of 20,000 draws at the 0.1 % point of 2 degrees of freedom."""
    weights = torch.tensor([3.0, 0.0, 1.0, 4.0], dtype=torch.float64)
    draws = [chance_of(1, 0, position).draw(0, weights) for position in range(20_000)]
    found = torch.bincount(torch.tensor(draws), minlength=4)
    expected = weights / weights.sum() * len(draws)
    kept = weights > 0
    assert found[1] == 0
    assert ((found - expected)[kept] ** 2 / expected[kept]).sum() < 13.82
