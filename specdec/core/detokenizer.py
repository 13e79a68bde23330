"""Tokens to text, piece by piece, and the search for stop strings in it."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from specdec.core.outputs import Segment

# What decoders write for bytes that are no character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text of one growing output. Never splits a character; holds back what may begin a stop string.

    Where no stop string is looked for, tokens become text when somebody asks, or when there is time (`settle`): a GPU
    waits while the host takes in what a step has yielded.

    Args:
        tokenizer: None for requests of token ids without text.
        stop: strings before which the text ends.
        include_stop: whether the text ends behind them instead.
        skip_special: leave special tokens out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        # Tokens of the last piece of text, and those after it, which are no text yet.
        self._recent: list[int] = []
        self._pending: list[int] = []
        self._stop = tuple(stop)
        self._may_stop = True
        self._last_accepted = False
        self._waiting: list[tuple[int, bool]] = []
        self._held: list[Segment] = []
        self._text = ""
        self.matched: str | None = None

    def token_text(self, token: int) -> str | None:
        """A token decoded alone."""
        return None if self._tokenizer is None else str(self._tokenizer.decode([token], skip_special_tokens=False))

    @property
    def text(self) -> str:
        """All of it."""
        self.settle()
        return self._text

    def settle(self) -> None:
        """Make text of the tokens that have waited for it."""
        for token, accepted in self._waiting:
            self._add(token, accepted)
        self._waiting.clear()

    def push(self, token: int, accepted: bool, may_stop: bool = True) -> bool:
        """Add a token; True if it completes a stop string, with which the text then ends.

        Args:
            may_stop: whether a stop string that ends in this token's text counts.
        """
        if not self._stop:
            self._waiting.append((token, accepted))
            return False
        self._may_stop = may_stop
        old = len(self._text)
        return self._add(token, accepted) and self._cut_at_stop(old)

    def _cut_at_stop(self, old: int) -> bool:
        """End the text at the first stop string that ends beyond its first `old` characters; True if there is one."""
        # Such a one begins at most its own length before them.
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, max(0, old - len(stop) + 1))) >= 0]
        if not (found and self._may_stop):
            return False
        at, self.matched = min(found, key=lambda match: match[0])
        if self._include_stop:
            at += len(self.matched)
        self._cut_held(len(self._text) - at)
        self._text = self._text[:at]
        return True

    def _add(self, token: int, accepted: bool) -> bool:
        """Return whether the token brings any text."""
        if self._tokenizer is None:
            return False
        self._pending.append(token)
        self._last_accepted = accepted
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception:  # tokenizers raises no other
            # Bytes that are no character change how a byte-fallback decoder writes the bytes before them, whose text is
            # given already: go on without those.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            piece = "".join(self._stream.step(self._tokenizer, one) or "" for one in self._pending)
        if piece:
            self._recent, self._pending = self._pending, []
            self._give(piece, accepted)
        return bool(piece)

    def _give(self, piece: str, accepted: bool) -> None:
        self._text += piece
        self._held.append(Segment(piece, accepted))

    def _finish(self) -> None:
        """Make text of the tokens held back for a last character that is incomplete, and leave only that out."""
        if self._tokenizer is None or not self._pending or self.matched is not None:
            return
        decode = self._tokenizer.decode
        before = decode(self._recent, skip_special_tokens=self._skip_special)
        after = decode(self._recent + self._pending, skip_special_tokens=self._skip_special)
        rest = after[len(before) :] if after.startswith(before) else ""
        # A byte-fallback decoder writes one for each byte of it.
        by_byte = self._tokenizer.token_to_id("<0x00>") is not None
        rest = rest.rstrip(REPLACEMENT) if by_byte else rest.removesuffix(REPLACEMENT)
        self._pending.clear()
        if rest:
            old = len(self._text)
            self._give(rest, self._last_accepted)
            self._cut_at_stop(old)

    def segments(self, final: bool) -> list[Segment]:
        """Text that is new and certain to stay; at the end, all of it."""
        self.settle()
        if final:
            self._finish()
        keep = 0 if final else self._partial_match()
        ready, self._held = self._split_held(keep)
        return ready

    def _partial_match(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        most = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(most, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
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
