"""Log-probabilities of tokens beside the likeliest others, as vLLM reports them."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Logprob(NamedTuple):
    """Of one token at one place.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the likeliest; how many tokens are at least as likely.
        decoded_token: its text alone, None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


def top_logprobs(log_probs: Tensor, tokens: Sequence[int], count: int) -> list[dict[int, Logprob]]:
    """Per row the token's own entry and those of the `count` likeliest (-1: all), likeliest first after its own.

    Args:
        log_probs: `[rows, vocab]`, normalised.
        tokens: one per row.
    """
    most = log_probs.shape[1] if count < 0 else count
    own = log_probs.gather(1, log_probs.new_tensor(tokens).long()[:, None])
    ranks = (log_probs >= own).sum(1).tolist()
    values, ids = log_probs.topk(most, dim=1)
    rows = []
    for token, value, rank, others, other_values in zip(
        tokens, own[:, 0].tolist(), ranks, ids.tolist(), values.tolist(), strict=True
    ):
        entries = {token: Logprob(value, rank)}
        for place, (other, other_value) in enumerate(zip(others, other_values, strict=True), 1):
            entries.setdefault(other, Logprob(other_value, place))
        rows.append(entries)
    return rows
