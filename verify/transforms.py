"""Logits to the distribution that is sampled from: one function for target, drafter and plain decoding."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.upload import upload
from specdec.verify.sampling import Context

# How many of the largest logits are sorted at first, beyond the top_k.
FIRST_SORTED = 32


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
    samplings = [part.context.sampling for part in parts]
    if all(not s.edits and (s.is_greedy or (s.temperature == 1 and not s.filters)) for s in samplings):
        return logits.to(exact)
    # One copy, and all else in place: fresh memory of this size costs more than the arithmetic.
    scores = logits.to(exact, copy=True)
    start = 0
    for part, sampling in zip(parts, samplings, strict=True):
        rows = scores[start : start + part.num_rows]
        start += part.num_rows
        if sampling.edits:
            _edit(rows, part)
        if not sampling.is_greedy and sampling.temperature != 1:
            rows /= sampling.temperature
    if any(s.filters for s in samplings):
        counts = upload([part.num_rows for part in parts], scores.device)
        limits = upload([[s.min_p, s.top_k, s.top_p] for s in samplings], scores.device, exact)
        limits = limits.repeat_interleave(counts, 0, output_size=len(scores))
        if all(s.filters for s in samplings):
            _filter_(scores, limits)
        else:
            filtered = upload([s.filters for s in samplings], scores.device, torch.bool)
            filtered = filtered.repeat_interleave(counts, output_size=len(scores))
            scores[filtered] = _filter_(scores[filtered], limits[filtered])
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


def _filter_(scores: Tensor, limits: Tensor) -> Tensor:
    """Keep what is likely enough, of that the `top_k` largest, of those the smallest set of mass `top_p`; in place.

    Args:
        limits: `[rows, 3]`, min_p, top_k and top_p of each row.
    """
    min_p, top_k, top_p = limits.split_with_sizes((1, 1, 1), 1)
    if (min_p > 0).any():
        scores.masked_fill_(scores < scores.amax(-1, keepdim=True) + min_p.log(), float("-inf"))
    bounded = ((top_k > 0) | (top_p < 1))[:, 0]
    if bounded.all():
        return _keep_likeliest_(scores, top_k, top_p)
    if bounded.any():
        scores[bounded] = _keep_likeliest_(scores[bounded], top_k[bounded], top_p[bounded])
    return scores


def _keep_likeliest_(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The `top_k` largest, all at 0, and of those the smallest set of mass `top_p`; in place."""
    # Only as many of the largest are sorted as these bounds can concern; a full sort is what would cost.
    vocab = scores.shape[1]
    open_ended = (top_k == 0).any()
    total = (scores - scores.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True) if open_ended else top_p
    # Some more than are kept, so that those that equal the last of them are seen.
    size = min(vocab, FIRST_SORTED + int(top_k.max()))
    while True:
        values, tokens = largest(scores, size)
        rank = torch.arange(size, device=scores.device)
        weights = (values - values[:, :1]).exp().masked_fill((rank >= top_k) & (top_k > 0), 0)
        sums = weights.cumsum(-1)
        wanted = top_p * torch.where(top_k > 0, sums[:, -1:], total)
        if size == vocab or ((top_k > 0) | (sums[:, -2:-1] >= wanted)).all():
            break
        size = min(vocab, 4 * size)
    # The likeliest token always stays; where nothing is asked of top_p, rounding must drop nothing.
    within = (sums - weights < wanted) & (weights > 0)
    count = torch.where(top_p < 1, within.sum(-1, keepdim=True).clamp(min=1), top_k.clamp(max=vocab).long())
    least = values.gather(1, count - 1)
    if ((rank == count) & (values == least) & least.isfinite()).any():
        # Of equal ones the lowest ids.
        if size < vocab and (values[:, -1:] == least).any():
            equal = scores == least
            room = count - (scores > least).sum(-1, keepdim=True)
            return scores.masked_fill_((scores < least) | (equal & (equal.cumsum(-1) > room)), float("-inf"))
        tokens, by_id = tokens.sort(-1)
        values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(1, by_value)
    return scores.fill_(float("-inf")).scatter_(1, tokens, values.masked_fill_(rank >= count, float("-inf")))


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row in order, and where they are: `topk`, several times as fast on wide rows.

    A row is cut into groups; the `count` groups of the largest maxima hold the `count` largest entries.
    """
    rows, vocab = scores.shape
    # Least work where the maxima are as many as the entries of the chosen groups.
    per_group = max(1, int((vocab / count) ** 0.5))
    num_groups = vocab // per_group
    if per_group == 1:
        values, indices = scores.topk(count, dim=-1)
        return values, indices
    grouped = scores[:, : num_groups * per_group].view(rows, per_group, num_groups)
    best = grouped.amax(1).topk(min(count, num_groups), dim=-1, sorted=False).indices
    members = best[:, None] + torch.arange(0, per_group * num_groups, num_groups, device=scores.device)[:, None]
    places = members.flatten(1)
    if rest := vocab - num_groups * per_group:
        places = torch.cat([places, torch.arange(vocab - rest, vocab, device=scores.device).expand(rows, -1)], 1)
    values, at = scores.gather(1, places).topk(count, dim=-1)
    return values, places.gather(1, at)
