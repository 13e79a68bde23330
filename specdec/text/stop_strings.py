"""The search for stop strings in a growing text."""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from tokenizers import Tokenizer


def special_in_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> dict[int, str]:
    """Return the special tokens that stop strings hold, with their text."""
    if not stops:
        return {}
    # One look for each special token, whatever the number of stop strings; the few that it finds are looked at again.
    joined = "\n".join(stops)
    special = {token: one.content for token, one in tokenizer.get_added_tokens_decoder().items() if one.special}
    found = {token: text for token, text in special.items() if text in joined}
    return {token: text for token, text in found.items() if any(text in stop for stop in stops)}


def stop_tokens(special: Mapping[int, str], stops: Sequence[str]) -> frozenset[int]:
    """Return the special tokens that are a whole stop string.

    Args:
        special: of `special_in_stops`.
    """
    return frozenset(token for token, text in special.items() if text in stops)


class StopMatch(NamedTuple):
    """A stop string that was found.

    Attributes:
        stop: the string.
        from_begin, from_end: shown characters from its beginning, and from its end, to the end of the text.
        is_shown: whether all of it is shown.
    """

    stop: str
    from_begin: int
    from_end: int
    is_shown: bool


class _Automaton:
    """Automaton that finds all stop strings by one look at each character (Aho and Corasick 1975).

    A state is a beginning of a stop string, namely the longest that the text ends with; state 0 is the empty one.

    Attributes:
        depth: characters of each state's text.
        shorter: by state, the longest other state that its text ends with.
        found: by state, the number of the longest stop string that its text ends with, -1 for none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth, self.shorter, self.found = [0], [0], [-1]
        for number, stop in enumerate(stops):
            self._add(stop, number)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for char, after in self._next[state].items():
                self.shorter[after] = self.step(self.shorter[state], char)
                if self.found[after] < 0:
                    self.found[after] = self.found[self.shorter[after]]
                waiting.append(after)

    def _add(self, stop: str, number: int) -> None:
        state = 0
        for char in stop:
            after = self._next[state].get(char)
            if after is None:
                after = self._next[state][char] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.shorter.append(0)
                self.found.append(-1)
            state = after
        if self.found[state] < 0:
            self.found[state] = number

    def step(self, state: int, char: str) -> int:
        """Return the state after another character."""
        while (after := self._next[state].get(char)) is None:
            if state == 0:
                return 0
            state = self.shorter[state]
        return after


class StopStrings(tuple[str, ...]):
    """Stop strings of a request, with the automaton that all its outputs search by."""

    @cached_property
    def automaton(self) -> _Automaton:
        """The automaton, made for the first output."""
        return _Automaton(self)

    @cached_property
    def longest(self) -> int:
        """Characters of the longest."""
        return max(map(len, self), default=0)


class StopSearch:
    """Search for stop strings at the end of a growing text, including special tokens that the text leaves out.

    Each character is looked at once, and nothing depends on the number of stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._automaton = self._stops.automaton
        self._state = self._length = 0
        # Beginning and end of parts near the end of the text that are not shown.
        self._hidden: list[tuple[int, int]] = []

    def add(self, text: str, is_shown: bool = True) -> StopMatch | None:
        """Add text; return the stop string that begins first of those that end in it."""
        if not is_shown:
            self._hidden.append((self._length, self._length + len(text)))
        automaton, state, found = self._automaton, self._state, None
        for end, char in enumerate(text, self._length + 1):
            state = automaton.step(state, char)
            if (number := automaton.found[state]) >= 0:
                first = end - len(self._stops[number]), number
                found = first if found is None else min(found, first)
        self._state = state
        self._length += len(text)
        match = None
        if found is not None:
            begin, number = found
            end = begin + len(self._stops[number])
            match = StopMatch(
                self._stops[number], self._num_shown(begin), self._num_shown(end), self._is_shown(begin, end)
            )
        reach = self._length - self._stops.longest
        while self._hidden and self._hidden[0][1] <= reach:
            del self._hidden[0]
        return match

    def _num_shown(self, begin: int) -> int:
        """Return how many characters are shown from a place on."""
        return self._length - begin - sum(end - max(begin, start) for start, end in self._hidden if end > begin)

    def _is_shown(self, begin: int, end: int) -> bool:
        return not any(start < end and begin < stop for start, stop in self._hidden)

    def num_held(self) -> int:
        """Return how many shown characters at the text's end may begin a stop string."""
        state, automaton = self._state, self._automaton
        if automaton.depth[state] == self._stops.longest:
            # Complete, and no part of a longer one.
            state = automaton.shorter[state]
        return self._num_shown(self._length - automaton.depth[state])
