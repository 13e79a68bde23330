"""min_p, top_k and top_p in plain torch: the reference of the Triton kernel, and what a CPU runs."""

import torch
from torch import Tensor

# Number of the largest scores sorted at first, beyond the top_k.
FIRST_SORTED = 32


def filter_logits(scores: Tensor, limits: Tensor) -> Tensor:
    """See `specdec.kernels.triton.logit_filters`; float64 as well."""
    min_p, top_k, top_p = limits.split_with_sizes((1, 1, 1), 1)
    if (min_p > 0).any():
        scores.masked_fill_(scores < scores.amax(-1, keepdim=True) + min_p.log(), float("-inf"))
    bounded = ((top_k > 0) | (top_p < 1))[:, 0]
    if bounded.all():
        return _keep_largest_(scores, top_k, top_p)
    if bounded.any():
        scores[bounded] = _keep_largest_(scores[bounded], top_k[bounded], top_p[bounded])
    return scores


def _keep_largest_(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the `top_k` largest (0: all), and of those the smallest set of mass `top_p`; in place."""
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
    """Return the `count` largest of each row in order, and their places: `topk`, several times as fast on wide rows.

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
