"""Log-probabilities of outputs, in the two forms of OpenAI's API: names of tokens, and where in a text each begins."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from specdec.core.logprobs import with_text
from specdec.core.outputs import Logprob
from specdec.models.tokenizer import Tokenizer
from specdec.openai.replies import ChatLogprobs, CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob
from specdec.text.text_stream import TextStream

# JSON has no infinity. vLLM's value.
LEAST = -9999.0

Entries = Mapping[int, Logprob]


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

    def next(self, token: int, entry: Logprob | None) -> tuple[str, int]:
        """Add a token; return its text, see `token_name` for one without, and the number of characters before it.

        A token that is a part of a character begins where that does.

        Args:
            entry: its own; None for one without a log-probability.
        """
        if entry is None:
            entry = Logprob(0.0, 1)
            entry = entry if self._texts is None else with_text(entry, token, self._texts)
        name, offset = token_name(token, entry), self.offset
        if self._stream is None:
            self.offset += len(name)
            return name, offset
        piece = self._stream.step(token)
        self.offset += len(piece)
        if piece and name.endswith(piece):
            # A text may begin without the space that the token has elsewhere.
            return piece, offset
        # Bytes before it that have turned out to be no character are text only now.
        return name, self.offset - len(name) if piece.endswith(name) else offset


def token_name(token: int, entry: Logprob) -> str:
    """Return a token's text; its bytes as OpenAI writes them if it is not whole characters, its id without a text."""
    if entry.part_bytes is not None:
        return f"bytes:{str(entry.part_bytes)[2:-1]}"
    return _text(token, entry)


def add_completion_logprobs(
    reply: CompletionLogprobs, tokens: Sequence[int], rows: Sequence[Entries | None], count: int, places: TokenPlaces
) -> None:
    """Add tokens in the form of `/v1/completions`.

    Args:
        rows: per token, its own entry and those of the most probable tokens; None for a prompt's first token.
        count: number of the most probable tokens to show.
        places: finds where each token's text begins.
    """
    for token, row in zip(tokens, rows, strict=True):
        name, offset = places.next(token, None if row is None else row[token])
        reply.tokens.append(name)
        reply.text_offset.append(offset)
        reply.token_logprobs.append(None if row is None else _value(row[token]))
        reply.top_logprobs.append(None if row is None else _most_probable(row, token, name, count))


def chat_logprobs(tokens: Sequence[int], rows: Sequence[Entries], count: int) -> ChatLogprobs:
    """Return the form of `/v1/chat/completions`, with the `count` most probable tokens of each place."""
    content = []
    for token, row in zip(tokens, rows, strict=True):
        own = row[token]
        best = sorted(row.items(), key=lambda item: (item[1].rank, item[0] != token))[:count]
        others = [TopLogprob(_text(other, entry), _value(entry), _bytes(other, entry)) for other, entry in best]
        content.append(TokenLogprob(_text(token, own), _value(own), _bytes(token, own), others))
    return ChatLogprobs(content)


def prompt_logprobs(rows: Sequence[Entries | None]) -> list[dict[int, PromptLogprob] | None]:
    """Return vLLM's form for the tokens of a prompt."""
    return [
        None
        if row is None
        else {token: PromptLogprob(_value(entry), entry.rank, entry.decoded_token) for token, entry in row.items()}
        for row in rows
    ]


def _most_probable(row: Entries, token: int, name: str, count: int) -> dict[str, float]:
    """Return the tokens of the first `count` ranks, and the token itself, as vLLM does.

    Of several tokens of one text all but one go by their ids.
    """
    found = {name: _value(row[token])}
    for other, entry in row.items():
        if entry.rank <= count and other != token:
            text = token_name(other, entry)
            found[f"token_id:{other}" if text in found else text] = _value(entry)
    return found


def _bytes(token: int, entry: Logprob) -> list[int]:
    return list(_text(token, entry).encode() if entry.part_bytes is None else entry.part_bytes)


def _value(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)


def _text(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token
