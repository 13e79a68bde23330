"""Logits to the distribution that is sampled from: one function for target, drafter and plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How one request samples.

    Attributes:
        temperature: 0 for the argmax, else the divisor of the logits.
        top_k: tokens kept, 0 for all.
        top_p: probability mass kept, in (0, 1].
        seed: key of the request's noise.
        sample_index: which of the request's samples this is.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    sample_index: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def processed_log_probs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Log p after temperature, top-k and top-p, in that order, as in vLLM; dropped tokens get -inf.

    A greedy row is left at temperature 1 without filters: its argmax is that of the logits.

    Args:
        logits: `[rows, vocab]`, any float dtype; computed in float32, float64 stays.
        samplings: one per row.

    Returns:
        `[rows, vocab]` normalised log-probabilities.
    """
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if all(s.is_greedy for s in samplings):
        return torch.log_softmax(logits, -1, dtype=exact)
    scores = logits.to(exact)
    device = logits.device
    temperature = torch.tensor([[s.temperature or 1.0] for s in samplings], dtype=scores.dtype, device=device)
    scores = scores / temperature
    vocab = logits.shape[1]
    ks = [min(s.top_k, vocab) if s.top_k and not s.is_greedy else vocab for s in samplings]
    ps = [1.0 if s.is_greedy else s.top_p for s in samplings]
    if any(k < vocab for k in ks) or any(p < 1.0 for p in ps):
        scores = _filter(scores, torch.tensor(ks, device=device), torch.tensor(ps, dtype=scores.dtype, device=device))
    return torch.log_softmax(scores, -1)


def _filter(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the `top_k` largest, of those the smallest set whose mass reaches `top_p`; ties by lowest id."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], float("-inf"))
    probs = torch.softmax(ordered, -1)
    before = probs.cumsum(-1) - probs
    # The most likely token always stays; where nothing is asked of top_p, rounding must drop nothing.
    dropped = (before >= top_p[:, None]) & (rank > 0) & (top_p < 1.0)[:, None]
    ordered = ordered.masked_fill(dropped, float("-inf"))
    return torch.empty_like(scores).scatter_(1, order, ordered)
