"""Log-probabilities of outputs, in the two forms of OpenAI's API."""

from collections.abc import Callable, Mapping, Sequence

from specdec.core.outputs import Logprob
from specdec.server.replies import ChatLogprobs, CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob

# JSON has no infinity. vLLM's value.
LEAST = -9999.0

Entries = Mapping[int, Logprob]


def completion_logprobs(
    tokens: Sequence[int], rows: Sequence[Entries | None], count: int, offset: int, decode: Callable[[int], str]
) -> CompletionLogprobs:
    """Return the form of `/v1/completions`.

    Args:
        rows: per token, its own entry and those of the most probable tokens; None for a prompt's first token.
        count: number of the most probable tokens to show.
        offset: where the first token's text begins.
        decode: names a token that has no entry.
    """
    reply = CompletionLogprobs()
    for token, row in zip(tokens, rows, strict=True):
        text = _text(token, row[token]) if row is not None else decode(token)
        reply.tokens.append(text)
        reply.text_offset.append(offset)
        reply.token_logprobs.append(None if row is None else _value(row[token]))
        reply.top_logprobs.append(None if row is None else _most_probable(row, token, count))
        offset += len(text)
    return reply


def chat_logprobs(tokens: Sequence[int], rows: Sequence[Entries], count: int) -> ChatLogprobs:
    """Return the form of `/v1/chat/completions`, with the `count` most probable tokens of each place."""
    content = []
    for token, row in zip(tokens, rows, strict=True):
        own, text = row[token], _text(token, row[token])
        best = sorted(row.items(), key=lambda item: (item[1].rank, item[0] != token))[:count]
        others = [
            TopLogprob(name, _value(entry), list(name.encode()))
            for name, entry in ((_text(other, entry), entry) for other, entry in best)
        ]
        content.append(TokenLogprob(text, _value(own), list(text.encode()), others))
    return ChatLogprobs(content)


def prompt_logprobs(rows: Sequence[Entries | None]) -> list[dict[int, PromptLogprob] | None]:
    """Return vLLM's form for the tokens of a prompt."""
    return [
        None
        if row is None
        else {token: PromptLogprob(_value(entry), entry.rank, entry.decoded_token) for token, entry in row.items()}
        for row in rows
    ]


def _most_probable(row: Entries, token: int, count: int) -> dict[str, float]:
    """Return the tokens of the first `count` ranks, and the token itself, as vLLM does."""
    shown = {other: entry for other, entry in row.items() if entry.rank <= count or other == token}
    return {_text(other, entry): _value(entry) for other, entry in shown.items()}


def _value(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)


def _text(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token
