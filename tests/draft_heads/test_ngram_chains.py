"""Chains from the text itself, against a search by hand."""

from hypothesis import given
from hypothesis import strategies as st

from specdec.draft_heads.drafting.chains import LONGEST_MATCH, ChainRates
from specdec.draft_heads.drafting.ngram_chains import LEAST_MATCH, NGramChains

# Few tokens, so that much of a text occurs twice.
texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def found(source: NGramChains, text: list[int], depth: int) -> list[tuple[list[int], int]]:
    return [(list(chain.tokens), chain.match) for chain in source.chains(text, depth)]


def matched(text: list[int], place: int) -> int:
    """Return how many of the last tokens also precede `place`."""
    count = 0
    while count < min(place, LONGEST_MATCH) and text[place - 1 - count] == text[-1 - count]:
        count += 1
    return count


def by_hand(text: list[int], most: int, depth: int) -> list[tuple[list[int], int]]:
    places = [place for place in range(1, len(text)) if matched(text, place) >= LEAST_MATCH]
    places.sort(key=lambda place: (-matched(text, place), -place))
    return [(text[place : place + depth], matched(text, place)) for place in places[:most]]


@given(texts, texts, st.integers(1, 4), st.integers(1, 5))
def test_chains_equal_a_search_by_hand_as_the_text_grows(
    text: list[int], more: list[int], most: int, depth: int
) -> None:
    source = NGramChains(most, ChainRates())
    assert found(source, text, depth) == by_hand(text, most, depth)
    assert found(source, text + more, depth) == by_hand(text + more, most, depth)


def test_the_longest_match_comes_first_then_the_latest() -> None:
    text = [1, 2, 3, 10, 0, 2, 3, 20, 0, 2, 3, 30, 9, 1, 2, 3]
    assert found(NGramChains(3, ChainRates()), text, 1) == [([10], 3), ([30], 2), ([20], 2)]


def test_a_text_that_repeats_itself_is_drafted_as_far_as_it_goes() -> None:
    assert found(NGramChains(1, ChainRates()), [5, 6, 7, 8, 5, 6], 6) == [([7, 8, 5, 6], 2)]


def test_nothing_follows_what_has_not_occurred() -> None:
    for text in ([1], [1, 2, 3], [4, 5, 4], [7, 7]):
        assert found(NGramChains(3, ChainRates()), text, 3) == []
