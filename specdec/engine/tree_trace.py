"""The trace of a step: its draft tree with the drafter's values and the target's probabilities, and its time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.outputs import TreeTrace
from specdec.core.request import Request
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.upload import upload
from specdec.scheduling.step_cost import StepCost
from specdec.scheduling.step_plan import PlannedRow, RowResult, prompt_tokens
from specdec.verify.transforms import NodeRows, processed_logits


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
