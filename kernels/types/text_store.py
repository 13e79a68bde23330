"""The interface of a store of texts that is searched by their last tokens, and its sizes. Pure Python."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

# Tokens of a page, which the store gives up as a whole.
PAGE = 32
# Numbers of tokens before a place by which the place is found, the shortest first.
ORDERS = (2, 6, 16)
# Longest match that is told apart from longer ones.
LONGEST = 32
# The latest places of each order that a search compares.
MOST_PLACES = 16
# The most continuations of a search.
MOST_FOUND = 16
# Memory of a store that is full: 4 bytes the token, 12 each order, and the pages.
BYTES_PER_TOKEN = 41.5
# No page: of a text that has none yet.
NO_PAGE = -1
# Two numbers of 64 bits: texts of one space are found by those of the same space alone.
Space = tuple[int, int]


class FoundText(NamedTuple):
    """A place of the store before which the last tokens of a text occur.

    Attributes:
        match: how many of the last tokens do, at most `LONGEST`.
        place: stands for it in `TextStore.touch`.
        tokens: the continuation from there on.
    """

    match: int
    place: int
    tokens: list[int]


class TextStore(Protocol):
    """Tokens of texts in pages, of which the least recently useful one is given up for a new one.

    Equal calls in equal order have equal results, whichever implementation runs. As it fills, it takes
    `BYTES_PER_TOKEN` of memory.
    """

    def append(self, text: int, space: Space, page: int, tokens: Sequence[int], context: int) -> int:
        """Append tokens to a text, and return the page of the last one.

        Args:
            text: number of the text, at least 0; no other has the same.
            page: what the call before returned for the text; `NO_PAGE` in the first one.
            tokens: the last tokens that were appended, as many as the longest order if there are, and the new ones.
            context: how many of them were appended before.
        """
        ...

    def find(self, text: int, space: Space, last: Sequence[int], most: int, depth: int) -> list[FoundText]:
        """Return continuations of the last tokens in other texts of a space, those of longer matches first.

        No two begin with the same token. Later places come before earlier ones among equals.

        Args:
            text: number of the text that is left out; -1 for none.
            last: last tokens; no more than `LONGEST` are compared.
            most: most continuations, of which there are never more than `MOST_FOUND`.
            depth: most tokens of each, at least 1.
        """
        ...

    def touch(self, place: int) -> None:
        """Note that a place was useful: its page is given up after all others."""
        ...


def num_pages(tokens: int) -> int:
    """Return the number of pages of a store for `tokens` tokens, at least 1."""
    return max(1, tokens // PAGE)
