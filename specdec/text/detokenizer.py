"""Incremental detokenization and the search for stop strings."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from tokenizers import Tokenizer

from specdec.text.segment import Segment
from specdec.text.stop_strings import StopMatch, StopSearch, stop_tokens
from specdec.text.text_stream import TextStream, WholeTokens
from specdec.text.token_texts import TokenTexts

_NONE: Mapping[int, str] = {}


class Detokenizer:
    """Text of one growing output. It splits no character, and holds back what may begin a stop string.

    Without stop strings, tokens become text only when the text is read or on `settle`, which the engine calls while
    the device is busy.

    Args:
        tokenizer: None for requests of token ids without text.
        stop: strings before which the text ends. The search begins behind the prompt. They may hold special tokens,
            also where these are no part of the text.
        include_stop: whether the text ends behind them instead.
        skip_special: leave special tokens out.
        spaced_special: keep the spaces between special tokens that are not left out.
        prompt: the tokens before the output, whose text goes on in the output's.
        kept_special: special tokens that are not left out.
        special_stops: the special tokens in stop strings, see `special_in_stops`.
        whole: see `TextStream`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        include_stop: bool = False,
        skip_special: bool = True,
        spaced_special: bool = True,
        prompt: Sequence[int] = (),
        kept_special: Collection[int] = (),
        special_stops: Mapping[int, str] = _NONE,
        whole: WholeTokens | None = None,
    ) -> None:
        self._tokenizer, self._include_stop = tokenizer, include_stop
        # Tokens whose text is written as it is if it follows one of them.
        self._added: dict[int, str] = {}
        if tokenizer is not None and not (skip_special or spaced_special):
            self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._last_token: int | None = None
        self._stream = None if tokenizer is None else TextStream(tokenizer, prompt, skip_special, kept_special, whole)
        self._search = StopSearch(stop) if stop else None
        # Special tokens that are searched and no part of the text.
        self._hidden = {
            token: text for token, text in special_stops.items() if skip_special and token not in kept_special
        }
        self._may_stop = True
        self._stop_tokens = stop_tokens(special_stops, stop)
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
        if self._search is None:
            self._waiting.append((token, accepted))
            return False
        self._may_stop = may_stop
        match = self._add(token, accepted)
        if match is None or not may_stop:
            return False
        self._cut(match)
        return True

    def is_stop(self, token: int) -> bool:
        """Return whether a token is a special one that is a stop string."""
        return token in self._stop_tokens

    def _cut(self, match: StopMatch) -> None:
        """End the text at a stop string."""
        self.matched = match.stop
        count = match.from_end if self._include_stop and match.is_shown else match.from_begin
        self._held, _ = self._split_held(count)
        self._text = self._text[: len(self._text) - count]
        if self._include_stop and not match.is_shown:
            self._give(match.stop, self._last_accepted)

    def _add(self, token: int, accepted: bool) -> StopMatch | None:
        """Add a token's text; return the stop string that ends in it."""
        if self._stream is None:
            return None
        self._last_accepted = accepted
        piece = self._stream.step(token)
        if piece and self._last_token in self._added:
            piece = self._added.get(token, piece)
        self._last_token = token
        if self._search is not None and token in self._hidden:
            return self._search.add(self._hidden[token], is_shown=False)
        if not piece:
            return None
        self._give(piece, accepted)
        return None if self._search is None else self._search.add(piece)

    def _give(self, piece: str, accepted: bool) -> None:
        self._text += piece
        self._held.append(Segment(piece, accepted))

    def _finish(self) -> None:
        """Detokenize the tokens held back for an incomplete last character, and leave out only that character."""
        rest = "" if self._stream is None or self.matched is not None else self._stream.end()
        if rest:
            self._give(rest, self._last_accepted)
            match = None if self._search is None else self._search.add(rest)
            if match is not None and self._may_stop:
                self._cut(match)

    def segments(self, final: bool) -> list[Segment]:
        """Return the text that is new and final; at the end of the output, all new text."""
        self.settle()
        if final:
            self._finish()
        keep = 0 if final or self._search is None else self._search.num_held()
        ready, self._held = self._split_held(keep)
        return ready

    @property
    def held(self) -> str:
        """Text that `segments` has not returned yet, because a stop string may begin in it."""
        return "".join(segment.text for segment in self._held)

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
