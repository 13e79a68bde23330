"""From the outcome of a step to the results of its rows, and the log-probabilities and traces that requests ask for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.logprobs import choice_logprobs, score_output, score_prompt
from specdec.core.outputs import LogprobsMode, TreeTrace
from specdec.core.request import Request
from specdec.execution.step_order import StepOrder, StepOutcome
from specdec.execution.worker import score_spans
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import NO_TOKEN, Acceptance
from specdec.kernels.types.upload import upload
from specdec.scheduling.step_cost import StepCost
from specdec.scheduling.step_plan import PlannedRow, RowResult, prompt_tokens
from specdec.verify.transforms import NodeRows, processed_logits


def row_results(
    rows: Sequence[PlannedRow], order: StepOrder, outcome: StepOutcome, mode: LogprobsMode, kernels: KernelSet
) -> list[RowResult]:
    """Return the results of rows, and store the log-probabilities that their requests ask for.

    Args:
        outcome: its `scores` are filled where it has logits.
        mode: what log-probabilities are made of.
        kernels: kernels of the device.
    """
    acceptances = iter(outcome.acceptances)
    results = [
        _result(tree, next(acceptances)) if row.sampled else RowResult()
        for row, tree in zip(rows, outcome.trees, strict=True)
    ]
    if outcome.logits is not None:
        _score_rows(rows, order, outcome, outcome.logits, results, mode, kernels)
    for place, scores in outcome.scores.items():
        row = rows[place]
        if row.choices is None:
            # Where the logits are, they stand there already.
            row.request.logprobs += scores if outcome.logits is None else []
        elif not row.request.finished:
            row.request.take_scores(row.choices, scores)
    return results


def _score_rows(
    rows: Sequence[PlannedRow],
    order: StepOrder,
    outcome: StepOutcome,
    logits: Tensor,
    results: Sequence[RowResult],
    mode: LogprobsMode,
    kernels: KernelSet,
) -> None:
    """Compute log-probabilities of choices, tokens and draft nodes, as far as the rows' requests ask for them."""
    acceptances, trees = iter(outcome.acceptances), outcome.trees
    spans = score_spans(order, [len(tree) for tree in trees])
    for place, (row, part, tree, span) in enumerate(zip(rows, order.parts, trees, spans, strict=True)):
        own, request = logits[span], row.request
        if row.choices is not None:
            outcome.scores[place] = choice_logprobs(row.choices, own)
            continue
        if part.num_scored > 1 or (part.num_scored and not row.sampled):
            score_prompt(request, own[: part.num_scored])
        if not row.sampled:
            continue
        num_known, acceptance, nodes = len(request.logprobs), next(acceptances), own[-1 - len(tree) :]
        if request.is_traced:
            results[place].node_probs = node_probs(request, tree, nodes, kernels)
        if request.params.logprobs is not None:
            score_output(request, acceptance, tree, nodes, mode, kernels)
            outcome.scores[place] = request.logprobs[num_known:]


def _result(tree: DraftTree, acceptance: Acceptance) -> RowResult:
    (path, next_token), num_nodes = acceptance, len(tree.tokens)
    is_dead_end = next_token == NO_TOKEN
    tokens = [tree.tokens[node] for node in path]
    if not is_dead_end:
        tokens.append(next_token)
    return RowResult(
        num_nodes=num_nodes,
        num_chained=tree.num_chained,
        path=path,
        ranks=[tree.ranks[node] for node in path] if tree.ranks else path,
        tokens=tokens,
        is_dead_end=is_dead_end,
        # Values of a draft node that overflow reach every row that reads them under a mask. A plain step would not
        # have met them.
        needs_retry=num_nodes > 0 and not tokens,
    )


def node_probs(request: Request, tree: DraftTree, logits: Tensor, kernels: KernelSet) -> tuple[float, ...]:
    """Return the target's probability of each node's token after its parent. The host waits for the device.

    Args:
        request: as it was before the step's tokens.
        logits: `[1 + nodes, vocab]` of the root and the tree's nodes.
    """
    if not len(tree):
        return ()
    device = logits.device
    scores = processed_logits(
        logits, [NodeRows(request.context, 1 + len(tree), lambda: upload(tree.path_tokens, device))], kernels
    )
    log_sums = torch.logsumexp(scores, -1)
    parents = upload([1 + parent for parent in tree.parents], device)
    chosen = scores[parents, upload(tree.tokens, device)] - log_sums[parents]
    probs: list[float] = chosen.exp().tolist()
    return tuple(probs)


def time_without_drafts(
    rows: Sequence[PlannedRow], trees: Sequence[DraftTree], cost: StepCost | None, seconds: float
) -> float | None:
    """Return the time that a step would have taken without drafts, None where costs are not measured.

    Args:
        seconds: the time that it took.
    """
    if not any(len(tree) and row.choices is None for row, tree in zip(rows, trees, strict=True)):
        return seconds
    if cost is None:
        return None
    prompts = prompt_tokens(rows)
    return cost.without_drafts(prompts.count(0), sum(prompts))


def trace_of(
    request: Request, tree: DraftTree, result: RowResult, seconds: float, plain_seconds: float | None
) -> TreeTrace:
    """Describe a step whose tokens the request has taken.

    Args:
        seconds: time of the step so far.
        plain_seconds: the time that it would have taken without drafts.
    """
    known = len(request.token_ids) - result.num_new
    return TreeTrace(
        root=request.token_ids[known - 1],
        tokens=tuple(tree.tokens),
        parents=tuple(tree.parents),
        path=tuple(result.path[: result.num_accepted]),
        output=tuple(request.token_ids[known:]),
        values=_values(tree),
        probs=result.node_probs,
        seconds=seconds,
        plain_seconds=plain_seconds,
        context=tuple(request.detokenizer.context) if known == request.num_prompt else (),
    )


def _values(tree: DraftTree) -> tuple[float | None, ...]:
    """Return the value of each node, None where its source gives none."""
    if tree.read_values is None:
        return (None,) * len(tree)
    return (*tree.read_values(), *[None] * tree.num_chained)
