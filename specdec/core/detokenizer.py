"""Incremental detokenization and the search for stop strings."""

from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer

from specdec.core.outputs import Segment
from specdec.core.text_stream import TextStream
from specdec.core.token_texts import TokenTexts


class Detokenizer:
    """Text of one growing output. It splits no character, and holds back what may begin a stop string.

    Without stop strings, tokens become text only when the text is read or on `settle`, which the engine calls while
    the device is busy.

    Args:
        tokenizer: None for requests of token ids without text.
        stop: strings before which the text ends. The search begins behind the prompt.
        include_stop: whether the text ends behind them instead.
        skip_special: leave special tokens out.
        spaced_special: keep the spaces between special tokens that are not left out.
        prompt: the tokens before the output, whose text goes on in the output's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        include_stop: bool = False,
        skip_special: bool = True,
        spaced_special: bool = True,
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._include_stop = tokenizer, include_stop
        # Tokens whose text is written as it is if it follows one of them.
        self._added: dict[int, str] = {}
        if tokenizer is not None and not (skip_special or spaced_special):
            self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._last_token: int | None = None
        self._stream = None if tokenizer is None else TextStream(tokenizer, prompt, skip_special)
        self._stop = tuple(stop)
        self._may_stop = True
        self._last_accepted = False
        self._waiting: list[tuple[int, bool]] = []
        self._held: list[Segment] = []
        self._text = ""
        self.matched: str | None = None

    @property
    def context(self) -> Sequence[int]:
        """The prompt's last tokens, as far as the text depends on them."""
        return () if self._stream is None else self._stream.context

    @cached_property
    def token_texts(self) -> TokenTexts | None:
        """Texts of single tokens; None without a tokenizer."""
        return None if self._tokenizer is None else TokenTexts(self._tokenizer)

    @property
    def text(self) -> str:
        """All text so far."""
        self.settle()
        return self._text

    def settle(self) -> None:
        """Detokenize the tokens that have not been yet."""
        for token, accepted in self._waiting:
            self._add(token, accepted)
        self._waiting.clear()

    def push(self, token: int, accepted: bool, may_stop: bool = True) -> bool:
        """Add a token. Return whether it completes a stop string, with which the text then ends.

        Args:
            may_stop: whether a stop string that ends in this token's text ends the output.
        """
        if not self._stop:
            self._waiting.append((token, accepted))
            return False
        self._may_stop = may_stop
        old = len(self._text)
        return self._add(token, accepted) and self._cut_at_stop(old)

    def _cut_at_stop(self, old: int) -> bool:
        """End the text at the first stop string that ends beyond its first `old` characters; return if there is one."""
        # It begins at most its own length before those.
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, max(0, old - len(stop) + 1))) >= 0]
        if not (found and self._may_stop):
            return False
        at, self.matched = min(found, key=lambda match: match[0])
        if self._include_stop:
            at += len(self.matched)
        self._held, _ = self._split_held(len(self._text) - at)
        self._text = self._text[:at]
        return True

    def _add(self, token: int, accepted: bool) -> bool:
        """Return whether the token brings any text."""
        if self._stream is None:
            return False
        self._last_accepted = accepted
        piece = self._stream.step(token)
        if piece and self._last_token in self._added:
            piece = self._added.get(token, piece)
        self._last_token = token
        if piece:
            self._give(piece, accepted)
        return bool(piece)

    def _give(self, piece: str, accepted: bool) -> None:
        self._text += piece
        self._held.append(Segment(piece, accepted))

    def _finish(self) -> None:
        """Detokenize the tokens held back for an incomplete last character, and leave out only that character."""
        rest = "" if self._stream is None or self.matched is not None else self._stream.end()
        if rest:
            old = len(self._text)
            self._give(rest, self._last_accepted)
            self._cut_at_stop(old)

    def segments(self, final: bool) -> list[Segment]:
        """Return the text that is new and final; at the end of the output, all new text."""
        self.settle()
        if final:
            self._finish()
        keep = 0 if final else self._partial_match()
        ready, self._held = self._split_held(keep)
        return ready

    @property
    def held(self) -> str:
        """Text that `segments` has not returned yet, because a stop string may begin in it."""
        return "".join(segment.text for segment in self._held)

    def _partial_match(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        most = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(most, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
                return size
        return 0

    def _split_held(self, count: int) -> tuple[list[Segment], list[Segment]]:
        """Split the held segments before their last `count` characters."""
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
