"""Tests that do not say a seed draw the same in every run."""

import random
import secrets
import zlib

import pytest
import torch


def expected(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(zlib.crc32(request.node.nodeid.encode()))


@pytest.mark.parametrize("place", range(2))
def test_unseeded_chance_is_seeded_by_the_tests_name(request: pytest.FixtureRequest, place: int) -> None:
    chance = expected(request)
    # Requests without a seed take theirs from `secrets.randbits`.
    assert [secrets.randbits(63), secrets.randbits(63)] == [chance.getrandbits(63), chance.getrandbits(63)]
    assert random.random() == chance.random()
    generator = torch.Generator().manual_seed(zlib.crc32(request.node.nodeid.encode()))
    assert torch.rand(3 + place).equal(torch.rand(3 + place, generator=generator))
