"""The plain, obviously correct loop: no cache, no batch, no drafts, the whole context anew for every token."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from specdec.core.sampling_params import SamplingParams
from specdec.kernels.reference.noise import gumbel
from specdec.verify.sampling import Sampling
from tests.verify.naive import naive_logits


@dataclass
class Expected:
    """Expected result of one sample of a request.

    Attributes:
        logprobs: per token, the log-probabilities `[vocab]` of the distribution that is reported.
        beyond: tokens that would follow if the output did not end, for drafters that know too much.
        rounds_either_way: returns whether another order of sums could change the log-probabilities by a rounding of
            float32; see `World.rounds_either_way`.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    stop_reason: int | str | None = None
    logprobs: list[Tensor] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)
    rounds_either_way: Callable[[], bool] = lambda: False


def generate(
    logits_of: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    params: SamplingParams,
    sampling: Sampling,
    *,
    end_tokens: frozenset[int] = frozenset(),
    tokenizer: Tokenizer | None = None,
    max_length: int = 1 << 30,
    processed: bool = False,
    beyond: int = 0,
) -> Expected:
    """Run one sample; `logits_of` gives the float64 `[vocab]` logits after a context."""
    result = Expected()
    most = min(params.max_tokens or max_length, max_length - len(prompt))
    ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else end_tokens)
    while len(result.tokens) < most:
        logits = logits_of([*prompt, *result.tokens])
        scores = naive_logits(logits.tolist(), sampling, prompt, result.tokens)
        if max(scores) == -math.inf:
            result.finish_reason = "error"
            break
        token = _choose(scores, sampling, len(result.tokens))
        shown = torch.tensor(scores, dtype=torch.float64) if processed else logits
        result.logprobs.append(shown.log_softmax(-1))
        result.tokens.append(token)
        if token in ends:
            result.finish_reason = "stop"
            result.stop_reason = token if token in (params.stop_token_ids or ()) else None
            if params.include_stop_str_in_output:
                result.text = _decode(tokenizer, result.tokens, params)
            break
        before, result.text = result.text, _decode(tokenizer, result.tokens, params)
        if len(result.tokens) > params.min_tokens and (found := _first_stop(result.text, before, params)):
            at, stop = found
            result.text = result.text[: at + len(stop) if params.include_stop_str_in_output else at]
            result.finish_reason, result.stop_reason = "stop", stop
            break
    while len(result.beyond) < beyond:
        known = [*result.tokens, *result.beyond]
        scores = naive_logits(logits_of([*prompt, *known]).tolist(), sampling, prompt, known)
        if max(scores) == -math.inf:
            break
        result.beyond.append(_choose(scores, sampling, len(known)))
    return result


def _decode(tokenizer: Tokenizer | None, tokens: list[int], params: SamplingParams) -> str:
    """Return the text of all tokens without its last character if that is incomplete. Invalid bytes before it stay."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens).removesuffix("\ufffd")


def _first_stop(text: str, before: str, params: SamplingParams) -> tuple[int, str] | None:
    """The leftmost stop string that ends in what is new, the first given of several there."""
    for at in range(len(text)):
        for stop in params.stop_strings:
            if text.startswith(stop, at) and at + len(stop) > len(before):
                return at, stop
    return None


def _choose(scores: list[float], sampling: Sampling, position: int) -> int:
    if sampling.is_greedy:
        return max(range(len(scores)), key=lambda v: (scores[v], -v))
    log_p = torch.tensor(scores, dtype=torch.float64).log_softmax(-1)
    noise = gumbel(sampling.seed, sampling.sample_index, position, len(scores)).double()
    perturbed = (log_p + noise).tolist()
    return max(range(len(scores)), key=lambda v: (perturbed[v], -v))
