"""The search for stop strings in a growing text."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer


def special_in_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> dict[int, str]:
    """Return the special tokens that stop strings hold, with their text."""
    if not stops:
        return {}
    added = tokenizer.get_added_tokens_decoder().items()
    return {token: one.content for token, one in added if one.special and any(one.content in stop for stop in stops)}


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


class StopSearch:
    """Search for stop strings at the end of a growing text, including special tokens that the text leaves out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._reach = max(map(len, self._stops), default=1) - 1
        self._text = ""
        # Per character, whether it is shown.
        self._shown: list[bool] = []

    def add(self, text: str, is_shown: bool = True) -> StopMatch | None:
        """Add text; return the stop string that begins first of those that end in it."""
        old = len(self._text)
        self._text += text
        self._shown += [is_shown] * len(text)
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, max(0, old - len(stop) + 1))) >= 0]
        match = None
        if found:
            at, stop = min(found, key=lambda each: each[0])
            end = at + len(stop)
            match = StopMatch(stop, sum(self._shown[at:]), sum(self._shown[end:]), all(self._shown[at:end]))
        cut = max(0, len(self._text) - self._reach)
        self._text, self._shown = self._text[cut:], self._shown[cut:]
        return match

    def num_held(self) -> int:
        """Return how many shown characters at the text's end may begin a stop string."""
        for at in range(len(self._text)):
            if any(stop.startswith(self._text[at:]) for stop in self._stops):
                return sum(self._shown[at:])
        return 0
