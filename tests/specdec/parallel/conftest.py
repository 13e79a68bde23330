"""Outputs that every layout of ranks must give."""

import pytest

from tests.specdec.parallel.ranked_engine import engine, texts
from tests.specdec.world import World


@pytest.fixture(scope="session")
def expected(world: World) -> list[list[int]]:
    """Plain decoding by one rank, each request alone."""
    with engine(world, "none", max_num_seqs=1) as llm:
        return texts(llm)
