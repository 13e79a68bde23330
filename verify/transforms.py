"""Processing of logits to the distribution that is sampled from; drafters have other forms, which tests hold to it."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.upload import upload
from specdec.verify.grammar_state import GrammarState
from specdec.verify.sampling import Context
from specdec.verify.thinking_state import ThinkingState


class NodeRows(NamedTuple):
    """Consecutive rows of logits of one request, each after its own path of draft tokens.

    Attributes:
        context: the request, up to where the paths begin.
        num_rows: number of rows.
        paths: returns the draft tokens before each row, int64 `[num_rows, depth]`, padded with -1 at the right; called
            only where a parameter depends on them.
    """

    context: Context
    num_rows: int
    paths: Callable[[], Tensor]


def processed_logits(logits: Tensor, parts: Sequence[NodeRows], kernels: KernelSet) -> Tensor:
    """Return logits after all parameters of the requests; dropped tokens are -inf.

    The order is vLLM's: grammar, allowed_token_ids, bad_words, min_tokens, logit_bias, penalties (repetition,
    frequency, presence), temperature, min_p, top_k, top_p. Each row counts its own path as output. Of equal logits,
    top_k and top_p keep the lowest ids. A greedy row ends before the temperature: its token is the argmax.

    Args:
        logits: `[rows, vocab]`, any float dtype; computed in float32, float64 stays.
        parts: the requests of the rows, in order.
        kernels: operations of the device.

    Returns:
        `[rows, vocab]`, not normalised; the input itself if no parameter is active.
    """
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    samplings = [part.context.sampling for part in parts]
    if not any(s.changes for s in samplings):
        return logits.to(exact)
    # One copy, and all else in place: fresh memory of this size costs more than the arithmetic.
    scores = logits.to(exact, copy=True)
    start = 0
    for part, sampling in zip(parts, samplings, strict=True):
        rows = scores[start : start + part.num_rows]
        start += part.num_rows
        if sampling.edits:
            _edit(rows, part)
    start = 0
    # One operation for neighbours of one temperature.
    for divisor, same in groupby(zip(samplings, parts, strict=True), lambda pair: pair[0].divisor):
        end = start + sum(part.num_rows for _, part in same)
        if divisor != 1:
            scores[start:end].div_(divisor)
        start = end
    if any(s.filters for s in samplings):
        limits = upload(
            [s.limits for s, part in zip(samplings, parts, strict=True) for _ in range(part.num_rows)],
            scores.device,
            exact,
        )
        kernels.filter_logits(scores, limits)
    return scores


def _edit(scores: Tensor, part: NodeRows) -> None:
    """Apply the edits that precede the temperature to one request's `[rows, vocab]`, in place.

    Without a sync, but for a grammar, which the host follows along the paths.
    """
    context, device = part.context, scores.device
    sampling = context.sampling
    follows = sampling.penalises or sampling.bad_words or sampling.grammar is not None
    needs_paths = follows or sampling.min_tokens > context.num_output
    # Before the first level of drafting they are empty.
    paths = part.paths().to(device) if needs_paths else torch.empty(part.num_rows, 0, dtype=torch.int64, device=device)
    if sampling.grammar is not None:
        forbid_outside(sampling.grammar, scores, context, paths)
    if sampling.allowed_token_ids is not None:
        allowed = upload(sampling.token_arrays.allowed, device)
        kept = scores[:, allowed]
        scores.fill_(float("-inf"))
        scores[:, allowed] = kept
    if sampling.bad_words:
        reach = sampling.token_arrays.bad_words.reach
        latest = context.token_ids[max(context.num_prompt, len(context.token_ids) - reach) :]
        sampling.token_arrays.bad_words.forbid(scores, latest, paths)
    if sampling.min_tokens > context.num_output and sampling.end_tokens:
        lengths = context.num_output + (paths >= 0).sum(1, keepdim=True)
        ends = upload(sampling.end_tokens, device)
        scores[:, ends] = scores[:, ends].masked_fill(lengths < sampling.min_tokens, float("-inf"))
    if sampling.logit_bias:
        tokens, addends = sampling.token_arrays.biased, sampling.token_arrays.addends
        scores[:, upload(tokens, device)] += upload(addends, device, scores.dtype)
    if sampling.penalises:
        _penalise(scores, context, paths)


def forbid_outside(
    grammar: GrammarState | ThinkingState, scores: Tensor, context: Context, paths: Tensor, first_token: int = 0
) -> None:
    """Forbid the tokens that a grammar does not have after the output and each row's path, in place.

    Args:
        scores: `[rows, tokens]` of one request, of tokens from `first_token` on.
        paths: see `NodeRows`.
    """
    drafted = [[token for token in path if token >= 0] for path in paths.tolist()]
    start, skipped = divmod(first_token, 8)
    own = grammar.masks(context.token_ids, drafted)
    if own is None:
        return
    own = own[:, start : ceil_div(first_token + scores.shape[1], 8)]
    places = upload(own, scores.device, torch.uint8).int().flatten()
    limits = _limits(scores.dtype, scores.device).index_select(0, places).view(len(own), -1)
    torch.minimum(scores, limits[:, skipped : skipped + scores.shape[1]], out=scores)


@cache
def _limits(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the limits of eight tokens' scores for each byte of a mask: inf, or -inf for a token that is not there.

    On a CPU the least of scores and limits takes a tenth of the time of `masked_fill_`.
    """
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.where(bits == 1, float("inf"), float("-inf")).to(dtype)


def _penalise(scores: Tensor, context: Context, paths: Tensor) -> None:
    """Apply the penalties, only to the columns of tokens that occur: a few hundred of the vocabulary.

    Only the device knows the tokens on a path. Their columns follow those that the host knows, and a token that
    occurs twice is given the same score twice.
    """
    sampling, device = context.sampling, scores.device
    known, counted = np.unique(np.array(context.token_ids), return_inverse=True)
    said = np.bincount(counted[context.num_prompt :], minlength=len(known))
    asked = np.bincount(counted[: context.num_prompt], minlength=len(known)) > 0
    own, count, in_prompt = upload(np.stack([known, said, asked]), device).unbind()
    # Padding is replaced by a column that is there anyway.
    drafted = torch.where(paths >= 0, paths, own[0]).flatten()
    place = torch.searchsorted(own, drafted).clamp_(max=len(own) - 1)
    is_known = own[place] == drafted
    tokens = torch.cat([own, drafted])
    in_prompt = torch.cat([in_prompt, in_prompt[place] * is_known]) > 0
    counts = torch.cat([count, count[place] * is_known]) + (paths[:, :, None] == tokens).sum(1)
    part = scores[:, tokens]
    if sampling.repetition_penalty != 1:
        seen = (counts > 0) | in_prompt
        penalty = sampling.repetition_penalty
        part = torch.where(seen, torch.where(part > 0, part / penalty, part * penalty), part)
    if sampling.frequency_penalty:
        part = part - sampling.frequency_penalty * counts.to(scores.dtype)
    if sampling.presence_penalty:
        part = part - sampling.presence_penalty * (counts > 0).to(scores.dtype)
    scores[:, tokens] = part
