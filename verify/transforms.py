"""Logits to the distribution that is sampled from: one function for target, drafter and plain decoding."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.verify.sampling import Context

# Of how many of the largest logits top_p is tried first.
FIRST_SORTED = 64


class NodeRows(NamedTuple):
    """Consecutive rows of logits that continue one request, each after a path of draft tokens of its own.

    Attributes:
        context: the request, up to where the paths begin.
        num_rows: how many.
        paths: gives int64 `[num_rows, depth]` draft tokens before each row, padded with -1 at the right; asked for
            only where a parameter depends on them.
    """

    context: Context
    num_rows: int
    paths: Callable[[], Tensor]


def processed_logits(logits: Tensor, parts: Sequence[NodeRows]) -> Tensor:
    """Logits after everything the requests ask for; dropped tokens are -inf.

    The order is vLLM's: allowed_token_ids, bad_words, min_tokens, logit_bias, penalties (repetition, frequency,
    presence), temperature, min_p, top_k, top_p. Each row counts its own path as output. Of equal logits,
    top_k and top_p keep the lowest ids. A greedy row ends before the temperature: its token is the argmax.

    Args:
        logits: `[rows, vocab]`, any float dtype; computed in float32, float64 stays.
        parts: what the rows continue, in order.

    Returns:
        `[rows, vocab]`, not normalised; the input itself where nothing is asked.
    """
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scores = logits.to(exact)
    if any(part.context.sampling.edits for part in parts) and scores.data_ptr() == logits.data_ptr():
        scores = scores.clone()
    start = 0
    for part in parts:
        if part.context.sampling.edits:
            _edit(scores[start : start + part.num_rows], part)
        start += part.num_rows
    samplings = [part.context.sampling for part in parts]
    if all(s.is_greedy or (s.temperature == 1 and not s.filters) for s in samplings):
        return scores

    def by_row(values: Sequence[float]) -> Tensor:
        """`[rows, 1]` of one value per part."""
        counts = torch.tensor([part.num_rows for part in parts], device=scores.device)
        return torch.tensor(values, dtype=exact, device=scores.device).repeat_interleave(counts)[:, None]

    scores = scores / by_row([1.0 if s.is_greedy else s.temperature for s in samplings])
    if any(s.filters for s in samplings):
        limits = [
            by_row([s.min_p for s in samplings]),
            by_row([float(s.top_k) for s in samplings]),
            by_row([s.top_p for s in samplings]),
        ]
        if all(s.filters for s in samplings):
            return _filter(scores, *limits)
        filtered = by_row([float(s.filters) for s in samplings])[:, 0].nonzero()[:, 0]
        scores[filtered] = _filter(scores[filtered], *(limit[filtered] for limit in limits))
    return scores


def _edit(scores: Tensor, part: NodeRows) -> None:
    """What comes before the temperature, on the `[rows, vocab]` of one request, in place."""
    context, device = part.context, scores.device
    sampling = context.sampling
    needs_paths = sampling.penalises or sampling.bad_words or sampling.min_tokens > context.num_output
    paths = part.paths().to(device) if needs_paths else torch.empty(part.num_rows, 0, dtype=torch.int64, device=device)
    if sampling.allowed_token_ids is not None:
        allowed = torch.tensor(sampling.allowed_token_ids, device=device)
        kept = scores[:, allowed]
        scores.fill_(float("-inf"))
        scores[:, allowed] = kept
    if sampling.bad_words:
        _forbid_words(scores, context, paths)
    if sampling.min_tokens > context.num_output and sampling.end_tokens:
        lengths = context.num_output + (paths >= 0).sum(1, keepdim=True)
        ends = torch.tensor(sampling.end_tokens, device=device)
        scores[:, ends] = scores[:, ends].masked_fill(lengths < sampling.min_tokens, float("-inf"))
    if sampling.logit_bias:
        tokens, addends = zip(*sampling.logit_bias, strict=True)
        scores[:, torch.tensor(tokens, device=device)] += torch.tensor(addends, dtype=scores.dtype, device=device)
    if sampling.penalises:
        _penalise(scores, context, paths)


def _forbid_words(scores: Tensor, context: Context, paths: Tensor) -> None:
    """Drop the last token of each sequence whose others are the latest output, path included."""
    words = context.sampling.bad_words
    longest = max(len(word) for word in words) - 1
    latest = list(context.output[-longest:]) if longest else []
    before = torch.tensor([-1] * (longest - len(latest)) + latest, dtype=torch.int64, device=scores.device)
    history = torch.cat([before.expand(len(paths), -1), paths], 1)
    ends = longest + (paths >= 0).sum(1, keepdim=True)
    for *prefix, last in words:
        if not prefix:
            scores[:, last] = float("-inf")
            continue
        wanted = torch.tensor(prefix, device=scores.device)
        window = history.gather(1, ends + torch.arange(-len(prefix), 0, device=scores.device))
        scores[:, last].masked_fill_((window == wanted).all(1), float("-inf"))


def _penalise(scores: Tensor, context: Context, paths: Tensor) -> None:
    """Only the columns of tokens that occur are touched, a few hundred of the vocabulary."""
    sampling, device = context.sampling, scores.device
    prompt, output = (torch.tensor(part, dtype=torch.int64, device=device) for part in (context.prompt, context.output))
    tokens = torch.unique(torch.cat([prompt, output, paths[paths >= 0]]))
    counts = torch.bincount(torch.searchsorted(tokens, output), minlength=len(tokens))
    counts = counts + (paths[:, :, None] == tokens).sum(1)
    part = scores[:, tokens]
    if sampling.repetition_penalty != 1:
        seen = (counts > 0) | torch.isin(tokens, prompt)
        penalty = sampling.repetition_penalty
        part = torch.where(seen, torch.where(part > 0, part / penalty, part * penalty), part)
    if sampling.frequency_penalty:
        part = part - sampling.frequency_penalty * counts.to(scores.dtype)
    if sampling.presence_penalty:
        part = part - sampling.presence_penalty * (counts > 0).to(scores.dtype)
    scores[:, tokens] = part


def _filter(scores: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep what is likely enough, of that the `top_k` largest, of those the smallest set of mass `top_p`."""
    if (min_p > 0).any():
        least = scores.max(-1, keepdim=True).values + min_p.log()
        scores = scores.masked_fill(scores < least, float("-inf"))
    if not ((top_k > 0) | (top_p < 1)).any():
        return scores
    # Only as many of the largest are sorted as these bounds can concern; a full sort is what would cost.
    vocab = scores.shape[1]
    open_ended = ((top_k == 0) & (top_p < 1)).any()
    total = (scores - scores.max(-1, keepdim=True).values).exp().sum(-1, keepdim=True) if open_ended else top_p
    size = min(vocab, max(FIRST_SORTED, int(top_k.max())))
    while True:
        values = scores.topk(size, dim=-1).values
        rank = torch.arange(size, device=scores.device)
        weights = (values - values[:, :1]).exp().masked_fill((rank >= top_k) & (top_k > 0), 0)
        sums = weights.cumsum(-1)
        wanted = top_p * torch.where(top_k > 0, sums[:, -1:], total)
        if size == vocab or ((top_k > 0) | (top_p == 1) | (sums[:, -1:] >= wanted)).all():
            break
        size = min(vocab, 4 * size)
    # The likeliest token always stays; where nothing is asked of top_p, rounding must drop nothing.
    within = (sums - weights < wanted) & (weights > 0)
    count = torch.where(top_p < 1, within.sum(-1, keepdim=True).clamp(min=1), top_k.clamp(max=vocab).long())
    bounded = (top_k > 0) | (top_p < 1)
    least = values.gather(1, (count - 1).clamp(0, size - 1)).masked_fill(~bounded, float("-inf"))
    dropped = scores < least
    if (bounded & (vocab - dropped.sum(-1, keepdim=True) > count)).any():
        # Of equal ones the lowest ids.
        equal = scores == least
        room = count - (scores > least).sum(-1, keepdim=True)
        dropped |= bounded & equal & (equal.cumsum(-1) > room)
    return scores.masked_fill(dropped, float("-inf"))
