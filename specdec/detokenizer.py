"""Tokens to text, piece by piece, and the search for stop strings in it."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from specdec.outputs import Segment


class Detokenizer:
    """Text of one growing output. Never splits a character; holds back what may begin a stop string.

    Args:
        tokenizer: None for requests of token ids without text.
        stop: strings before which the text ends.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held: list[Segment] = []
        self.text = ""
        self.matched: str | None = None

    def push(self, token: int, accepted: bool) -> bool:
        """Add a token; True if it completes a stop string, before which the text then ends."""
        if self._tokenizer is None:
            return False
        piece = self._stream.step(self._tokenizer, token)
        if not piece:
            return False
        # A match ends in the new piece, so it begins at most a stop string's length before it.
        old = len(self.text)
        self.text += piece
        self._held.append(Segment(piece, accepted))
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, max(0, old - len(stop) + 1))) >= 0]
        if not found:
            return False
        at, self.matched = min(found, key=lambda match: match[0])
        self._cut_held(len(self.text) - at)
        self.text = self.text[:at]
        return True

    def segments(self, final: bool) -> list[Segment]:
        """Text that is new and certain to stay; at the end, all of it."""
        keep = 0 if final else self._partial_match()
        ready, self._held = self._split_held(keep)
        return ready

    def _partial_match(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        most = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(most, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return size
        return 0

    def _cut_held(self, count: int) -> None:
        self._held = self._split_held(count)[0]

    def _split_held(self, count: int) -> tuple[list[Segment], list[Segment]]:
        """Held segments without their last `count` characters, and those."""
        ready = list(self._held)
        rest: list[Segment] = []
        while count > 0 and ready:
            text, accepted = ready.pop()
            cut = max(0, len(text) - count)
            count -= len(text) - cut
            rest.insert(0, Segment(text[cut:], accepted))
            if cut:
                ready.append(Segment(text[:cut], accepted))
        return ready, rest
