"""Names of the tokens of a completion, and where in its text each begins."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from specdec.core.logprobs import with_text
from specdec.core.outputs import Logprob
from specdec.models.tokenizer import Tokenizer
from specdec.text.text_stream import TextStream


class TokenPlace(NamedTuple):
    """A token of a text.

    Attributes:
        name: its text; see `token_name` for one without.
        offset: characters before it. A token that is a part of a character begins where that does.
    """

    name: str
    offset: int


class TokenPlaces:
    """The tokens of a text in their order.

    Args:
        tokenizer: None for tokens without text, whose names count instead.
        context: the tokens before the first.
        skip_special: whether special tokens are no part of the text.

    Attributes:
        offset: characters of the text so far.
    """

    def __init__(self, tokenizer: Tokenizer | None, context: Sequence[int], skip_special: bool) -> None:
        self._tokenizer, self._context, self._skip_special = tokenizer, context, skip_special
        self._texts = None if tokenizer is None else tokenizer.token_texts
        self.offset = 0

    @cached_property
    def _stream(self) -> TextStream | None:
        # Made with the first token: a prompt is checked by the engine, later than answers are prepared.
        if self._tokenizer is None:
            return None
        return TextStream(self._tokenizer.backend, self._context, self._skip_special)

    def next(self, token: int, entry: Logprob | None) -> TokenPlace:
        """Add a token; return its place.

        Args:
            entry: its own; None for one without a log-probability.
        """
        if entry is None:
            entry = Logprob(0.0, 1)
            entry = entry if self._texts is None else with_text(entry, token, self._texts)
        name, offset = token_name(token, entry), self.offset
        if self._stream is None:
            self.offset += len(name)
            return TokenPlace(name, offset)
        piece = self._stream.step(token)
        self.offset += len(piece)
        if piece and name.endswith(piece):
            # A text may begin without the space that the token has elsewhere.
            return TokenPlace(piece, offset)
        # Bytes before it that have turned out to be no character are text only now.
        return TokenPlace(name, self.offset - len(name) if piece.endswith(name) else offset)


def token_name(token: int, entry: Logprob) -> str:
    """Return a token's text; its bytes as OpenAI writes them if it is not whole characters, its id without a text."""
    if entry.part_bytes is not None:
        return f"bytes:{str(entry.part_bytes)[2:-1]}"
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token
