"""Chains from a predicted text: a cursor that follows the output through it. Pure Python."""

from bisect import bisect_left
from collections.abc import Sequence

from specdec.draft_heads.drafting.chains import LONGEST_MATCH, Chain, ChainRates
from specdec.draft_heads.drafting.ngram_chains import match_length

# Distance from the cursor within which a single token is enough to synchronise again.
NEAR = 32
# Places of the last token that are compared, those nearest to the cursor, so that no text takes long.
MOST_PLACES = 256


class PredictedText:
    """Source of one chain: the predicted text from the cursor on.

    While output and prediction agree, the cursor moves with the output. After a mismatch it stays, so that it goes on
    behind inserted tokens. It jumps to where the last tokens of the output occur in the prediction: to the longest
    match, and among equals to the place nearest to the cursor, which finds the text behind deleted or replaced tokens.

    Args:
        tokens: the predicted text.
        num_prompt: tokens of the request before its output.
        rates: acceptance of its chains.
    """

    def __init__(self, tokens: Sequence[int], num_prompt: int, rates: ChainRates) -> None:
        self.tokens, self.rates = tokens, rates
        self._num_prompt = self._num_read = num_prompt
        self._cursor = self._match = 0
        # The cursor where output and prediction last agreed for more than a token.
        self._anchor = 0
        self._appeared = bytearray(len(tokens))
        self._places: dict[int, list[int]] = {}
        for place, token in enumerate(tokens, 1):
            self._places.setdefault(token, []).append(place)

    @property
    def num_accepted(self) -> int:
        """Number of tokens of the prediction that have appeared in the output."""
        return sum(self._appeared)

    @property
    def num_rejected(self) -> int:
        """Number of tokens of the prediction that have not appeared in the output."""
        return len(self.tokens) - self.num_accepted

    def chains(self, token_ids: Sequence[int], depth: int) -> list[Chain]:
        """See `ChainSource.chains`."""
        self.follow(token_ids)
        tokens = self.tokens[self._cursor : self._cursor + depth]
        return [Chain(tokens, self._match, self.rates)] if tokens else []

    def follow(self, token_ids: Sequence[int]) -> None:
        """Move the cursor by the output's new tokens."""
        for end in range(self._num_read, len(token_ids)):
            token = token_ids[end]
            if self._cursor < len(self.tokens) and self.tokens[self._cursor] == token:
                self._cursor += 1
                self._match += 1
                self._appeared[self._cursor - 1] = 1
                if self._match > 1:
                    self._anchor = self._cursor
            else:
                self._synchronise(token_ids[max(self._num_prompt, end + 1 - LONGEST_MATCH) : end + 1])
        self._num_read = max(self._num_read, len(token_ids))

    def _synchronise(self, last: Sequence[int]) -> None:
        """Jump behind the best match of the output's last tokens; without one, return to where they last agreed."""
        places, anchor = self._places.get(last[-1], []), self._anchor
        middle = bisect_left(places, anchor)
        nearest = places[max(0, middle - MOST_PLACES // 2) : middle + MOST_PLACES // 2]
        found = [(match_length(last, self.tokens, place), -abs(place - anchor), place) for place in nearest]
        match, distance, place = max(found, default=(0, 0, 0))
        if match > 1:
            self._cursor, self._match, self._anchor = place, match, place
        elif match == 1 and -distance <= NEAR:
            self._cursor, self._match = place, match
        else:
            self._cursor, self._match = anchor, 0
        for agreed in range(self._cursor - self._match, self._cursor):
            self._appeared[agreed] = 1
