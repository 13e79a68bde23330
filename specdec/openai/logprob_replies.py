"""Log-probabilities of outputs, in the two forms of OpenAI's API."""

from collections.abc import Mapping, Sequence

from specdec.core.outputs import Logprob
from specdec.openai.replies import ChatLogprobs, CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob
from specdec.openai.token_places import TokenPlaces, token_name

# JSON has no infinity. vLLM's value.
LEAST = -9999.0

Entries = Mapping[int, Logprob]


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
        place = places.next(token, None if row is None else row[token])
        reply.tokens.append(place.name)
        reply.text_offset.append(place.offset)
        reply.token_logprobs.append(None if row is None else _value(row[token]))
        reply.top_logprobs.append(None if row is None else _most_probable(row, token, place.name, count))


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
