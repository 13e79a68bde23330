"""The search for stop strings: that of one string after another, without a look at each of them."""

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.text.detokenizer import Detokenizer
from specdec.text.stop_strings import StopMatch, StopSearch
from tests.specdec.text.byte_level import byte_tokenizer

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=8)
PIECES = st.lists(st.tuples(st.text("ab", min_size=1, max_size=4), st.booleans()), max_size=12)


class PlainSearch:
    """The search said plainly: every stop string at every place."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.text, self.shown = stops, "", list[bool]()

    def add(self, text: str, is_shown: bool) -> StopMatch | None:
        old = len(self.text)
        self.text += text
        self.shown += [is_shown] * len(text)
        found = [
            (begin, number)
            for number, stop in enumerate(self.stops)
            for begin in range(len(self.text))
            if self.text.startswith(stop, begin) and begin + len(stop) > old
        ]
        if not found:
            return None
        begin, number = min(found)
        end = begin + len(self.stops[number])
        shown = self.shown
        return StopMatch(self.stops[number], sum(shown[begin:]), sum(shown[end:]), all(shown[begin:end]))

    def num_held(self) -> int:
        longest = max(map(len, self.stops))
        for begin in range(max(0, len(self.text) - longest + 1), len(self.text)):
            if any(stop.startswith(self.text[begin:]) for stop in self.stops):
                return sum(self.shown[begin:])
        return 0


@given(stops=STOPS, pieces=PIECES)
def test_the_automaton_finds_what_each_string_alone_finds(stops: list[str], pieces: list[tuple[str, bool]]) -> None:
    search, plain = StopSearch(stops), PlainSearch(stops)
    for text, is_shown in pieces:
        assert search.add(text, is_shown) == plain.add(text, is_shown)
        assert search.num_held() == plain.num_held()


class CallCount:
    """Counts calls of functions, those of C included."""

    count = 0

    def __call__(self, _: FrameType, event: str, __: Any) -> None:
        self.count += event in ("call", "c_call")


def calls(stops: Sequence[str], add: int) -> int:
    """Calls for some tokens of an output with these stop strings, and for its text that is ready then."""
    tokenizer = byte_tokenizer()
    detokenizer, tokens = Detokenizer(tokenizer, stops), tokenizer.encode("a house").ids
    counter = CallCount()
    sys.setprofile(counter)
    try:
        for token in tokens * add:
            detokenizer.push(token, False)
        detokenizer.segments(final=False)
    finally:
        sys.setprofile(None)
    return counter.count


@pytest.mark.parametrize("add", [1, 5])
def test_a_token_costs_the_same_with_a_thousand_stop_strings(add: int) -> None:
    many = [f"{number} is no such text" for number in range(1000)]
    assert calls(many, add) <= calls(many[:1], add) + add
