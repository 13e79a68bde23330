"""A language of eleven tokens in which every text has one continuation, for stand-ins of other engines."""

from collections.abc import Sequence

VOCAB = 11


def next_token(text: Sequence[int]) -> int:
    """Continue texts so that prompt lookup is often right."""
    return (text[-2] if len(text) > 1 else 3) if len(text) % 5 else (sum(text) % VOCAB)


def continued(prompt: Sequence[int], count: int, ends: Sequence[int] = ()) -> list[int]:
    """Return the tokens after a prompt, up to an end token."""
    text = list(prompt)
    while len(text) < len(prompt) + count and (len(text) == len(prompt) or text[-1] not in ends):
        text.append(next_token(text))
    return text[len(prompt) :]
