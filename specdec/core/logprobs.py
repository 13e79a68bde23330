"""Log-probabilities of tokens and of the most probable others, as vLLM reports them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.choices import ChoiceTree
from specdec.core.outputs import Logprob, LogprobsMode
from specdec.core.request import Request
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import Acceptance
from specdec.kernels.types.upload import upload
from specdec.text.text_stream import REPLACEMENT
from specdec.text.token_texts import TokenTexts
from specdec.verify.transforms import NodeRows, processed_logits

# Rows of a prompt that are scored together: each takes several float32 of the vocabulary's size, and a GPU's memory was
# measured with steps that score no prompt.
PROMPT_ROWS = 256


def score_prompt(request: Request, logits: Tensor) -> None:
    """Record the log-probabilities of the prompt tokens that a step's rows predict.

    Args:
        logits: `[rows, vocab]`, the rows after the cached tokens.
    """
    assert request.params.prompt_logprobs is not None
    start = request.num_cached + 1
    tokens = request.token_ids[start : min(start + len(logits), request.num_prompt)]
    # A preempted request recomputes tokens that are scored already.
    if tokens and len(request.prompt_logprobs) < start + len(tokens):
        known = max(0, len(request.prompt_logprobs) - start)
        for first in range(known, len(tokens), PROMPT_ROWS):
            part = tokens[first : first + PROMPT_ROWS]
            scores = _log_softmax(logits[first : first + len(part)])
            request.prompt_logprobs += _named(request, top_logprobs(scores, part, request.params.prompt_logprobs))


def score_output(
    request: Request, acceptance: Acceptance, tree: DraftTree, logits: Tensor, mode: LogprobsMode, kernels: KernelSet
) -> None:
    """Record the log-probabilities of a step's tokens.

    Args:
        logits: `[1 + nodes, vocab]` of the root and the tree's nodes.
        kernels: kernels of the device.
    """
    assert request.params.logprobs is not None
    tokens = [*(tree.tokens[node] for node in acceptance.path), acceptance.next_token]
    rows = [0, *(1 + node for node in acceptance.path)]
    scores = logits[upload(rows, logits.device)]
    if mode == "processed_logprobs":
        paths = upload([tree.path_tokens[row] for row in rows], logits.device)
        scores = processed_logits(scores, [NodeRows(request.context, len(rows), lambda: paths)], kernels)
    if tokens[-1] < 0:
        tokens, scores = tokens[:-1], scores[:-1]
    request.logprobs += _named(request, top_logprobs(_log_softmax(scores), tokens, request.params.logprobs))


def choice_logprobs(tree: ChoiceTree, logits: Tensor) -> list[float]:
    """Return the log-probability of each token of `tree.read`, before any parameter is applied.

    Args:
        logits: `[1 + nodes, vocab]` of the root and the tree's nodes.
    """
    rows, tokens = zip(*((1 + node, token) for node, token in tree.read), strict=True)
    log_probs = _log_softmax(logits)
    found = log_probs[upload(rows, logits.device), upload(tokens, logits.device)]
    return [float(value) for value in found.tolist()]


def _named(request: Request, rows: list[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
    """Add the text of each token."""
    texts = request.detokenizer.token_texts
    if texts is None:
        return rows
    return [{token: with_text(entry, token, texts) for token, entry in row.items()} for row in rows]


def with_text(entry: Logprob, token: int, texts: TokenTexts) -> Logprob:
    """Add a token's text, and its bytes where it is not whole characters."""
    text = texts.text(token)
    # Asked of every entry of every token.
    part = texts.part_bytes(token) if REPLACEMENT in text else None
    return entry._replace(decoded_token=text, part_bytes=part)


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


def top_logprobs(log_probs: Tensor, tokens: Sequence[int], count: int) -> list[dict[int, Logprob]]:
    """Return per row the token's own entry, then those of the `count` most probable tokens (-1: all).

    Args:
        log_probs: `[rows, vocab]`, normalised.
        tokens: one per row.
    """
    most = log_probs.shape[1] if count < 0 else count
    own = log_probs.gather(1, upload(tokens, log_probs.device)[:, None])
    ranks = (log_probs >= own).sum(1, keepdim=True)
    values, ids = log_probs.topk(most, dim=1)
    rows = []
    # One read, because the host waits for the GPU at each; ids are exact in float64.
    table = torch.cat([part.double() for part in (own, ranks, values, ids)], 1).tolist()
    for token, (value, rank, *others) in zip(tokens, table, strict=True):
        entries = {token: Logprob(value, int(rank))}
        for place, (other_value, other) in enumerate(zip(others[:most], others[most:], strict=True), 1):
            entries.setdefault(int(other), Logprob(other_value, place))
        rows.append(entries)
    return rows
