"""Names of blocks: equal exactly where everything up to the block's end is equal."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.cache.block_pool import extend_hashes
from tests.profiles import num_cases

CASES = num_cases(200)
# Neighbours here are equal to Python's `hash`, to 32 bits or to 8, or differ in the sign alone.
CONFUSED = [-1, -2, 0, 2**61 - 1, 2**32, 1, 2**61, 2**32 + 1, 257, -257, 2**63 - 1, -(2**63)]
SALTS = [None, "", " ", "a", "salt ", "a\0", "\u00e4", "a\u0308"]

tokens = st.lists(st.sampled_from(CONFUSED), max_size=14)
sizes = st.integers(1, 5)
salts = st.sampled_from(SALTS)


def names(token_ids: list[int], size: int, salt: str | None = None) -> list[bytes]:
    """All at once."""
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, size, salt)
    return hashes


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two lists that often begin alike, and are often alike but for one token."""
    first, rest = draw(tokens), draw(tokens)
    second = first[: draw(st.integers(0, len(first)))] + rest
    if draw(st.booleans()):
        second = list(first)
        if first and draw(st.booleans()):
            second[draw(st.integers(0, len(first) - 1))] = draw(st.sampled_from(CONFUSED))
    return first, second


@pytest.mark.long
@settings(max_examples=CASES)
@given(pair=pairs(), size=sizes, first_salt=salts, second_salt=salts, same_salt=st.booleans())
def test_names_are_equal_iff_tokens_from_the_beginning_and_salts_are(
    pair: tuple[list[int], list[int]], size: int, first_salt: str | None, second_salt: str | None, same_salt: bool
) -> None:
    first, second = pair
    second_salt = first_salt if same_salt else second_salt
    one, other = names(first, size, first_salt), names(second, size, second_salt)
    for (i, a), (j, b) in product(enumerate(one, 1), enumerate(other, 1)):
        alike = first_salt == second_salt and first[: i * size] == second[: j * size]
        assert (a == b) == alike


@given(tokens, sizes, salts, st.data())
def test_names_are_the_same_however_the_tokens_came(
    token_ids: list[int], size: int, salt: str | None, data: st.DataObject
) -> None:
    hashes: list[bytes] = []
    end = 0
    while end < len(token_ids):
        end = data.draw(st.integers(end + 1, len(token_ids)))
        extend_hashes(hashes, token_ids[:end], size, salt)
        assert len(hashes) == end // size
    assert hashes == names(token_ids, size, salt)


def test_tokens_that_python_confuses_are_told_apart() -> None:
    assert hash((-1,)) == hash((-2,))
    assert hash((0,)) == hash((2**61 - 1,))
    assert len({names([token], 1)[0] for token in CONFUSED}) == len(CONFUSED)
    assert all(names([a, b], 2) != names([b, a], 2) for a, b in pairwise(CONFUSED))


def test_salts_are_told_apart_from_each_other_and_from_none() -> None:
    assert len({names([7, 7], 2, salt)[0] for salt in SALTS}) == len(SALTS)


@pytest.mark.parametrize("salt", ["\ud800", "a\udfff"])
def test_every_text_is_a_salt(salt: str) -> None:
    """JSON can hold half a surrogate pair; what the scheduler cannot name would stop all requests, not one."""
    assert names([1], 1, salt) != names([1], 1, "")


def test_hashed_blocks_are_not_hashed_again() -> None:
    """Names are kept by the request; asking again must not look at tokens that have theirs."""
    hashes = names([1, 2, 3, 4], 2)
    before = list(hashes)
    extend_hashes(hashes, [9, 9, 9, 9, 5, 6, 7], 2, None)
    assert hashes[:2] == before
    assert hashes == names([1, 2, 3, 4, 5, 6], 2)
