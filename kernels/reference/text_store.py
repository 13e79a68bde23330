"""A bounded store of texts, searched by their last tokens: the twin of `native/text_store.c`. Pure Python.

A place is a token of a page. Under each order it stands in the list of a bucket, which a hash of the tokens before it
chooses, the newest first. Lists are linked by numbers, as in C, so that a page is given up without a search.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.kernels.types.text_store import (
    LONGEST,
    MOST_FOUND,
    MOST_PLACES,
    NO_PAGE,
    ORDERS,
    PAGE,
    FoundText,
    Space,
    num_pages,
)

NONE = NO_PAGE
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _Page:
    """A page of a text; see `page` of text_store.c."""

    text: int
    space: Space
    before: int
    context: int
    after: int = NONE
    used: int = 0


class PythonTextStore:
    """See `TextStore`.

    Args:
        tokens: that it holds, in whole pages.
    """

    def __init__(self, tokens: int) -> None:
        self._num_pages = num_pages(tokens)
        places = self._buckets = self._num_pages * PAGE
        self._pages: list[_Page] = []
        # The page that was useful last comes last.
        self._by_use = OrderedDict[int, None]()
        self._tokens = _numbers(places)
        # Neighbours of a place in the list of its bucket. `newer` of the newest is ~bucket.
        self._older, self._newer = [_numbers(places) for _ in ORDERS], [_numbers(places) for _ in ORDERS]
        # The newest place + 1 of each bucket, 0 for none.
        self._heads = [_numbers(places) for _ in ORDERS]

    def append(self, text: int, space: Space, page: int, tokens: Sequence[int], context: int) -> int:
        """See `TextStore.append`."""
        if page != NONE and self._pages[page].text != text:
            page = NONE
        for index in range(context, len(tokens)):
            if page == NONE or self._pages[page].used == PAGE:
                page = self._new_page(text, space, page, index)
            own = self._pages[page]
            place = page * PAGE + own.used
            own.used += 1
            self._tokens[place] = tokens[index]
            for number, order in enumerate(ORDERS):
                if index >= order:
                    self._link(place, number, self._bucket(space, tokens[index - order : index]))
        return page

    def find(self, text: int, space: Space, last: Sequence[int], most: int, depth: int) -> list[FoundText]:
        """See `TextStore.find`."""
        last, most = last[-LONGEST:], min(most, MOST_FOUND)
        found: list[tuple[int, int]] = []
        for number, order in reversed(list(enumerate(ORDERS))):
            if len(last) < order or len(found) >= most:
                continue
            place, seen = self._heads[number][self._bucket(space, last[len(last) - order :])] - 1, 0
            while place != NONE and seen < MOST_PLACES:
                own = self._pages[place // PAGE]
                if own.text != text and own.space == space and (match := self._match(place, last)) >= order:
                    found = self._kept(found, match, place)[:most]
                place, seen = self._older[number][place], seen + 1
        return [FoundText(match, place, self._continuation(place, depth)) for match, place in found]

    def touch(self, place: int) -> None:
        """See `TextStore.touch`."""
        self._by_use.move_to_end(place // PAGE)

    def _kept(self, found: list[tuple[int, int]], match: int, place: int) -> list[tuple[int, int]]:
        """Return the places found with one more, unless one of at least its match begins alike."""
        token = self._tokens[place]
        if any(self._tokens[other] == token and known >= match for known, other in found):
            return found
        others = [each for each in found if self._tokens[each[1]] != token]
        # Stable: earlier ones stay before equal ones.
        return sorted([*others, (match, place)], key=lambda each: -each[0])

    def _match(self, place: int, last: Sequence[int]) -> int:
        """Return how many of the last tokens stand before a place."""
        page, at = divmod(place, PAGE)
        for found, token in enumerate(reversed(last)):
            if not at:
                page, at = self._pages[page].before, PAGE
                if page == NONE:
                    return found
            at -= 1
            if self._tokens[page * PAGE + at] != token:
                return found
        return len(last)

    def _continuation(self, place: int, depth: int) -> list[int]:
        tokens: list[int] = []
        page, at = divmod(place, PAGE)
        while page != NONE and len(tokens) < depth:
            end = min(self._pages[page].used, at + depth - len(tokens))
            tokens += self._tokens[page * PAGE + at : page * PAGE + end]
            page, at = self._pages[page].after, 0
        return tokens

    def _bucket(self, space: Space, before: Sequence[int]) -> int:
        found = space[0] ^ len(before)
        for token in before:
            found = (found ^ token) * 0x9E3779B97F4A7C15 & _MASK
            found ^= found >> 29
        return (found >> 32) * self._buckets >> 32

    def _link(self, place: int, number: int, bucket: int) -> None:
        heads = self._heads[number]
        head = heads[bucket] - 1
        self._older[number][place], self._newer[number][place] = head, ~bucket
        if head != NONE:
            self._newer[number][head] = place
        heads[bucket] = place + 1

    def _unlink(self, place: int, number: int) -> None:
        older, newer = self._older[number][place], self._newer[number][place]
        if newer < 0:
            self._heads[number][~newer] = older + 1
        else:
            self._older[number][newer] = older
        if older != NONE:
            self._newer[number][older] = newer

    def _new_page(self, text: int, space: Space, before: int, context: int) -> int:
        """Return a page that is free, as the last one of a text."""
        page = len(self._pages)
        if page == self._num_pages:
            page, _ = self._by_use.popitem(last=False)
            self._give_up(page)
        # What was given up may be the page before.
        if before != NONE and self._pages[before].text != text:
            before = NONE
        if before != NONE:
            self._pages[before].after = page
        self._pages[page : page + 1] = [_Page(text, space, before, min(context, ORDERS[-1]))]
        self._by_use[page] = None
        return page

    def _give_up(self, page: int) -> None:
        own = self._pages[page]
        for number, order in enumerate(ORDERS):
            for index in range(max(0, order - own.context), own.used):
                self._unlink(page * PAGE + index, number)
        if own.before != NONE:
            self._pages[own.before].after = NONE
        if own.after != NONE:
            self._pages[own.after].before = NONE
        own.text = NONE


def _numbers(count: int) -> "array[int]":
    return array("i", bytes(4 * count))
