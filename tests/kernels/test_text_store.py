"""The store of texts: the compiled one and its Python twin have equal results, which are true."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels.native.library import library_file
from specdec.kernels.native.text_store import NativeTextStore
from specdec.kernels.reference.text_store import PythonTextStore
from specdec.kernels.types.text_store import (
    BYTES_PER_TOKEN,
    LONGEST,
    MOST_PLACES,
    NO_PAGE,
    ORDERS,
    PAGE,
    FoundText,
    Space,
    TextStore,
    num_pages,
)
from tests.profiles import num_cases

STORES: list[Any] = [
    PythonTextStore,
    pytest.param(NativeTextStore, marks=pytest.mark.skipif(library_file() is None, reason="not built here")),
]
Make = Callable[[int], TextStore]
SPACES: list[Space] = [(1, 2), (1, 3), ((1 << 63) - 1, 0), (0, 0)]
which = st.integers(0, 4)
events = st.lists(
    st.one_of(
        st.tuples(st.just("append"), which, st.integers(1, 3 * PAGE)),
        st.tuples(st.just("append"), which, st.integers(1, 3)),
        st.tuples(st.just("find"), which, st.integers(1, LONGEST + 3), st.integers(1, 5), st.integers(1, 2 * PAGE)),
        st.tuples(st.just("touch"), st.integers(0, 99)),
    ),
    max_size=40,
)


class Texts:
    """Texts that repeat themselves and each other, on their way into a store; text n is of space n % 4.

    Args:
        letters: distinct tokens.
    """

    def __init__(self, store: TextStore, letters: int, seed: int) -> None:
        self.store, self.letters, self.random = store, letters, random.Random(seed)
        self.tokens: list[list[int]] = [[] for _ in range(5)]
        self.pages = [NO_PAGE] * 5

    def space(self, text: int) -> Space:
        return SPACES[text % 4]

    def is_shared(self, text: int, other: int) -> bool:
        return self.space(text) == self.space(other)

    def size(self, text: int) -> int:
        return len(self.tokens[text])

    def append(self, text: int, count: int) -> int:
        own = self.tokens[text]
        known = len(own)
        while len(own) < known + count:
            source = self.tokens[self.random.randrange(5)]
            if source and self.random.random() < 0.6:
                start = self.random.randrange(len(source))
                own += source[start : start + self.random.randrange(1, 2 * PAGE)]
            else:
                own.append(self.random.randrange(self.letters))
        del own[known + count :]
        start = max(0, known - ORDERS[-1])
        page = self.store.append(text, self.space(text), self.pages[text], own[start:], known - start)
        self.pages[text] = page
        return page

    def find(self, text: int, length: int, most: int, depth: int, asker: int | None = None) -> list[FoundText]:
        last = self.tokens[text][-length:]
        return self.store.find(text if asker is None else asker, self.space(text), last, most, depth)


@pytest.mark.long
@pytest.mark.skipif(library_file() is None, reason="not built here")
@settings(max_examples=num_cases(100))
@given(
    events=events, tokens=st.integers(1, 12 * PAGE), letters=st.sampled_from([2, 4, 30]), seed=st.integers(0, 1 << 30)
)
def test_twins_have_equal_results(events: list[Any], tokens: int, letters: int, seed: int) -> None:
    both = [Texts(store, letters, seed) for store in (NativeTextStore(tokens), PythonTextStore(tokens))]
    for kind, *drawn in events:
        if kind == "append":
            native, twin = (one.append(*drawn) for one in both)
        elif kind == "find":
            native, twin = (one.find(*drawn) for one in both)
        else:
            place = drawn[0] % (num_pages(tokens) * PAGE)
            # Places of pages that were never used are not found.
            if place // PAGE <= max(both[1].pages):
                for one in both:
                    one.store.touch(place)
            continue
        assert native == twin


@pytest.mark.parametrize("make", STORES)
@settings(max_examples=num_cases(50))
@given(events=events, letters=st.sampled_from([2, 4, 30]), seed=st.integers(0, 1 << 30))
def test_what_is_found_is_so(make: Make, events: list[Any], letters: int, seed: int) -> None:
    """Nothing is given up here: every match and continuation is looked for in all other texts of the space."""
    texts = Texts(make(1 << 17), letters, seed)
    for kind, *drawn in events:
        if kind == "append":
            texts.append(*drawn)
        elif kind == "find":
            text, length, most, depth = drawn
            last = texts.tokens[text][-length:][-LONGEST:]
            others = [own for other, own in enumerate(texts.tokens) if other != text and texts.is_shared(other, text)]
            known = [
                (match_before(own, place, last), own[place : place + depth])
                for own in others
                for place in range(len(own))
            ]
            found = texts.find(*drawn)
            matches = [match for match, *_ in found]
            assert all((match, tokens) in known for match, _, tokens in found)
            assert matches == sorted(matches, reverse=True)
            assert all(match >= ORDERS[0] for match in matches)
            assert len({tokens[0] for *_, tokens in found}) == len(found) <= most
            longest = max((match for match, _ in known), default=0)
            if longest >= ORDERS[0]:
                order = max(order for order in ORDERS if order <= longest)
                # Its own places, and some that share a bucket by chance, are among those that are compared.
                own = sum(match_before(texts.tokens[text], place, last) >= order for place in range(texts.size(text)))
                if own + sum(match >= order for match, _ in known) <= MOST_PLACES // 2:
                    assert found[0].match == longest


def match_before(text: list[int], place: int, last: list[int]) -> int:
    match = 0
    while match < min(place, len(last)) and text[place - 1 - match] == last[-1 - match]:
        match += 1
    return match


@pytest.mark.parametrize("make", STORES)
def test_spaces_share_nothing(make: Make) -> None:
    store, text = make(1000), list(range(40))
    for number, space in enumerate(SPACES):
        assert store.find(9, space, text, 3, 4) == []
        store.append(number, space, NO_PAGE, [*text, 100 + number], 0)
    for number, space in enumerate(SPACES):
        assert [tokens for *_, tokens in store.find(9, space, text, 3, 4)] == [[100 + number]]
        # Nor does a text find itself.
        assert store.find(number, space, text, 3, 4) == []


@pytest.mark.parametrize("make", STORES)
def test_the_least_recently_useful_page_is_given_up(make: Make) -> None:
    store, space = make(4 * PAGE), SPACES[0]
    # Each text is a page.
    texts = [[100 * number + i for i in range(PAGE)] for number in range(6)]
    for number in range(4):
        store.append(number, space, NO_PAGE, texts[number], 0)
    (found,) = store.find(9, space, texts[0][:20], 1, 5)
    assert found.tokens == texts[0][20:25]
    store.touch(found.place)
    for number in (4, 5):
        store.append(number, space, NO_PAGE, texts[number], 0)
    assert [bool(store.find(9, space, text[:20], 1, 5)) for text in texts] == [True, False, False, True, True, True]


@pytest.mark.parametrize("make", STORES)
def test_a_text_that_is_longer_than_the_store_keeps_its_end(make: Make) -> None:
    store, text, page = make(2 * PAGE), list(range(7 * PAGE)), NO_PAGE
    for start in range(0, len(text), 5):
        known = max(0, start - ORDERS[-1])
        page = store.append(0, SPACES[0], page, text[known : start + 5], start - known)
    assert store.find(9, SPACES[0], text[: 3 * PAGE], 1, 4) == []
    (found,) = store.find(9, SPACES[0], text[:-3], 1, 4)
    assert found.tokens == text[-3:]


@pytest.mark.skipif(library_file() is None, reason="not built here")
def test_memory_per_token() -> None:
    """Ten million tokens take at most 1 GB."""
    tokens = 10_000_000
    assert NativeTextStore(tokens).num_bytes == tokens * BYTES_PER_TOKEN < 1e9
