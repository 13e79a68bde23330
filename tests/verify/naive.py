"""The transforms said plainly: one row, Python lists, one token at a time."""

import math
from collections.abc import Sequence

from specdec.verify.sampling import Sampling


def naive_logits(
    logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Processed logits after `prompt` and `output` (drafts of the path included); -inf for dropped tokens."""
    scores = list(logits)
    for v in range(len(scores)):
        if sampling.allowed_token_ids is not None and v not in sampling.allowed_token_ids:
            scores[v] = -math.inf
        for word in sampling.bad_words:
            if (
                v == word[-1]
                and list(output[len(output) - len(word) + 1 :]) == list(word[:-1])
                and len(output) >= len(word) - 1
            ):
                scores[v] = -math.inf
        if v in sampling.end_tokens and len(output) < sampling.min_tokens:
            scores[v] = -math.inf
        scores[v] += dict(sampling.logit_bias).get(v, 0.0)
        if v in prompt or v in output:
            penalty = sampling.repetition_penalty
            scores[v] = scores[v] / penalty if scores[v] > 0 else scores[v] * penalty
        scores[v] -= sampling.frequency_penalty * list(output).count(v)
        scores[v] -= sampling.presence_penalty * (v in output)
    if sampling.is_greedy:
        return scores
    scores = [score / sampling.temperature for score in scores]
    top = max(scores)
    weights = {v: math.exp(score - top) for v, score in enumerate(scores) if score > -math.inf}
    weights = {v: weight for v, weight in weights.items() if weight >= sampling.min_p}
    order = sorted(weights, key=lambda v: (-scores[v], v))
    kept = order[: sampling.top_k] if sampling.top_k else order
    total = sum(weights[v] for v in kept)
    nucleus: list[int] = []
    before = 0.0
    for v in kept:
        if nucleus and sampling.top_p < 1 and before / total >= sampling.top_p:
            break
        nucleus.append(v)
        before += weights[v]
    return [scores[v] if v in nucleus else -math.inf for v in range(len(scores))]
