"""Chains from the text itself: continuations of earlier occurrences of the last tokens (prompt lookup, Saxena 2023).

Pure Python.
"""

from collections.abc import Sequence

from specdec.draft_heads.drafting.chains import LONGEST_MATCH, Chain, ChainRates

# Least number of last tokens that must occur earlier in the text.
LEAST_MATCH = 2
# The latest places of the last two tokens that are compared, so that no text takes long.
MOST_PLACES = 256


class NGramChains:
    """Source of the continuations of several places in a request's text.

    Places that match more of the last tokens come first, later ones before earlier ones among equals.

    Args:
        most: most places used.
        rates: acceptance of its chains.
    """

    def __init__(self, most: int, rates: ChainRates) -> None:
        self.most, self.rates = most, rates
        # Two tokens in a row, and the places behind them.
        self._places: dict[tuple[int, int], list[int]] = {}
        self._num_read = LEAST_MATCH

    def chains(self, token_ids: Sequence[int], depth: int) -> list[Chain]:
        """See `ChainSource.chains`."""
        size = len(token_ids)
        # The end of the text itself is no place.
        for place in range(self._num_read, size):
            self._places.setdefault((token_ids[place - 2], token_ids[place - 1]), []).append(place)
        self._num_read = max(self._num_read, size)
        if size < LEAST_MATCH:
            return []
        places = self._places.get((token_ids[-2], token_ids[-1]), [])[-MOST_PLACES:]
        matches = [(match_length(token_ids, token_ids, place), place) for place in places]
        best = sorted(matches, reverse=True)[: self.most]
        return [Chain(token_ids[place : place + depth], match, self.rates) for match, place in best]


def match_length(token_ids: Sequence[int], text: Sequence[int], place: int) -> int:
    """Return how many of the last tokens also precede a place of a text, at most `LONGEST_MATCH`."""
    count, most = 0, min(LONGEST_MATCH, place, len(token_ids))
    while count < most and text[place - 1 - count] == token_ids[-1 - count]:
        count += 1
    return count
