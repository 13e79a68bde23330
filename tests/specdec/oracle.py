"""The plain, obviously correct loop: no cache, no batch, no drafts, the whole context anew for every token."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.sampling_params import SamplingParams
from specdec.verify.noise import gumbel


def generate(
    logits_of: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    params: SamplingParams,
    end_tokens: frozenset[int] = frozenset(),
) -> list[int]:
    """Tokens after `prompt`; `logits_of` gives the float64 `[vocab]` logits after a context."""
    tokens = list(prompt)
    assert params.max_tokens is not None
    for position in range(params.max_tokens):
        tokens.append(_choose(logits_of(tokens), params, position))
        if tokens[-1] in end_tokens and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


def _choose(logits: Tensor, params: SamplingParams, position: int) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    log_p = torch.log_softmax(logits / params.temperature, -1)
    order = sorted(range(len(log_p)), key=lambda v: (-log_p[v].item(), v))
    kept = order[: params.top_k] if params.top_k > 0 else order
    mass = sum(log_p[v].exp().item() for v in kept)
    nucleus: list[int] = []
    before = 0.0
    for v in kept:
        if nucleus and params.top_p < 1 and before / mass >= params.top_p:
            break
        nucleus.append(v)
        before += log_p[v].exp().item()
    assert params.seed is not None
    noise = gumbel(params.seed, 0, position, len(log_p)).double()
    return max(nucleus, key=lambda v: (log_p[v].item() + noise[v].item(), -v))
