"""Batches of an epoch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.train_eagle.passes.features import packed


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120), st.integers(0, 9))
def test_every_conversation_is_once_in_a_batch_that_holds_it(lengths: list[int], size: int, seed: int) -> None:
    batches = packed(lengths, size, seed)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in batch) <= size for batch in batches)
    assert all(batches)
    assert batches == packed(lengths, size, seed)


def test_little_of_a_batch_stays_empty_and_orders_differ() -> None:
    lengths = [20 + i * 37 % 180 for i in range(2000)]
    batches = packed(lengths, 1000, 0)
    assert sum(lengths) / (1000 * len(batches)) > 0.97
    assert batches != packed(lengths, 1000, 1)


def test_a_conversation_that_no_batch_holds_is_named() -> None:
    with pytest.raises(ValueError, match="has 80 tokens, more than batch_tokens 64; raise it"):
        packed([10, 80], 64, 0)
