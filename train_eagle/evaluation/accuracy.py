"""Accuracy of a head: the rank that it gives the target's next token, at every depth of correct drafts."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from specdec.core.outputs import RequestOutput
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.draft_heads.heads.block_head import BlockForm
from specdec.draft_heads.heads.draft_head import HeadForm
from specdec.draft_heads.heads.edge_scorers import block_edges
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.rope import rotary_at
from specdec.llm import LLM
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.passes.block_pass import slot_states, tokens_before
from specdec.train_eagle.passes.features import FeatureBatch, OnlineFeatures
from specdec.train_eagle.passes.unrolled_attention import UnrolledAttention

# Rank of a token past the end of the text.
NO_TOKEN = -1
# Accuracy counts the target's token among the head's 1, 2 and 3 likeliest.
TOP = 3


def head_of(llm: LLM) -> tuple[HeadForm, MatrixReadout]:
    """Return the draft head of an engine and its readout.

    Raises:
        ValueError: what drafts is no head that reads the target's states.
    """
    head, drafter = llm.engine.worker.runner.head, llm.engine.worker.drafter
    if head is not None and head.module is not None and isinstance(drafter, TreeDrafter):
        return cast("HeadForm", head), drafter.readout
    raise ValueError(f"{llm.config.draft}: not a draft head, and only those can be evaluated; give the folder of one")


def accuracy(llm: LLM, outputs: Sequence[RequestOutput], depth: int) -> list[list[float]]:
    """Return the accuracy of `llm`'s head on texts that it has answered, `[depth][TOP]`, as `Evaluation` has it.

    Raises:
        ValueError: what drafts is no head that reads the target's states.
    """
    head, readout = head_of(llm)
    longest = head.llama.max_position
    samples = []
    for output in outputs:
        # The engine drafts from the first token of an answer on.
        known = len(output.prompt_token_ids) + 1
        tokens = [*output.prompt_token_ids, *output.token_ids][:longest]
        if len(tokens) > known:
            samples.append(Sample(tokens, [i >= known for i in range(len(tokens))]))
    source = OnlineFeatures(llm.model, samples, head.taps)
    ranks = [token_ranks(head, readout, source.batch([i]), depth).cpu() for i in range(len(samples))]
    joined = torch.cat([torch.empty(depth, 0, dtype=torch.int64), *ranks], 1)
    comes = joined != NO_TOKEN
    shares = [(comes & (joined < top)).sum(1) / comes.sum(1).clamp_min(1) for top in range(1, TOP + 1)]
    return [[round(share, 4) for share in of_depth] for of_depth in torch.stack(shares, 1).tolist()]


@torch.no_grad()
def token_ranks(head: HeadForm, readout: MatrixReadout, batch: FeatureBatch, depth: int) -> Tensor:
    """Rank the target's tokens in one conversation, as training does.

    A root is a token whose next one is in the conversation's mask. Below it the head drafts the tokens of the
    conversation, each from its own state of the one before (Li et al. 2025, section 3.2), or a block head all in one
    pass, its edge scorer reading the conversation's token before each. Where its likeliest tokens are the
    conversation's, these are the drafts that it makes when it serves.

    Args:
        batch: one conversation, no longer than the head has positions.

    Returns:
        int64 `[depth, roots]`, how many tokens are likelier to the head than the next one: 0 for its likeliest,
        `vocab_size` if it cannot propose the next one, `NO_TOKEN` past the end, and behind the block of a block head.
    """
    if head.block is not None:
        return _block_ranks(cast("BlockForm", head), readout, batch, depth)
    features = batch.read_by(head)[:-1]
    # Row r takes token r + 1 and the feature of token r, and predicts token r + 2.
    tokens, rows = batch.tokens, len(batch.tokens) - 1
    roots = batch.mask[2:].nonzero().flatten()
    attentions = [UnrolledAttention([rows], roots, window) for window in head.windows]
    table = _rope(head, tokens.device)
    hidden = head(tokens[1:], features, rotary_at(table, torch.arange(rows, device=tokens.device)), attentions)[roots]
    found = [_ranks(head, readout, hidden, tokens, roots + 2)]
    for step in range(1, depth):
        ahead = (roots + step).clamp_max(rows - 1)
        hidden = head(tokens[ahead + 1], hidden, rotary_at(table, ahead), attentions)
        found.append(_ranks(head, readout, hidden, tokens, roots + 2 + step))
    return torch.stack(found)


def _block_ranks(head: BlockForm, readout: MatrixReadout, batch: FeatureBatch, depth: int) -> Tensor:
    tokens = batch.tokens
    # A root is the token before the first that is drafted.
    roots = batch.mask[2:].nonzero().flatten() + 1
    hidden = slot_states(head, batch, roots, _rope(head, tokens.device))
    ranks = torch.full((depth, len(roots)), NO_TOKEN, device=tokens.device)
    scorer, edges = head.edge_scorer, None
    if scorer is not None:
        edges = block_edges(scorer, tokens_before(batch, roots, hidden.shape[1]), hidden)
    for slot in range(min(depth, hidden.shape[1])):
        vectors = None if edges is None else edges[:, slot]
        ranks[slot] = _ranks(head, readout, hidden[:, slot], tokens, roots + 1 + slot, vectors)
    return ranks


def _rope(head: HeadForm, device: torch.device) -> Tensor:
    llama = head.llama
    dtype = torch.promote_types(head.dtype, torch.float32)
    return llama.rope.table(llama.head_dim, llama.max_position, dtype).to(device)


def _ranks(
    head: HeadForm, readout: MatrixReadout, hidden: Tensor, tokens: Tensor, places: Tensor, edges: Tensor | None = None
) -> Tensor:
    """Return the ranks of the tokens at `places`, by the states before them.

    Args:
        edges: `[places, rank]`, vectors of a block head's edge scorer.
    """
    ranks = torch.full_like(places, NO_TOKEN)
    inside = places < len(tokens)
    if inside.any():
        scores = readout(head.read(hidden[inside])).full()
        if edges is not None:
            scores += _bias(cast("BlockForm", head), scores, edges[inside])
        own = scores.gather(1, tokens[places[inside]].unsqueeze(1))
        likelier = (scores > own).sum(1)
        ranks[inside] = likelier.where(own.squeeze(1) > float("-inf"), scores.shape[1])
    return ranks


def _bias(head: BlockForm, scores: Tensor, vectors: Tensor) -> Tensor:
    """Return what edges add to the scores of the likeliest tokens, which alone are drafted; 0 for others."""
    scorer = head.edge_scorer
    assert scorer is not None
    of_all = torch.zeros_like(scores)
    proposed = slice(None) if head.draft_tokens is None else head.draft_tokens
    of_all[:, proposed] = (vectors @ scorer.successors.t()).to(scores.dtype)
    likeliest = scores.topk(min(scorer.candidates, scores.shape[1])).indices
    return torch.zeros_like(scores).scatter_(1, likeliest, of_all.gather(1, likeliest))
