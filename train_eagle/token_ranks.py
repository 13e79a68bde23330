"""How a head ranks what the target says next, at every depth of drafts that follow it."""

import torch
from torch import Tensor

from specdec.draft_heads.heads.draft_head import TargetOutput
from specdec.draft_heads.heads.eagle import EagleHead
from specdec.draft_heads.heads.eagle3 import Eagle3Head
from specdec.draft_heads.heads.readout import Readout
from specdec.draft_heads.llama.rope import rotary_at
from specdec.train_eagle.features import FeatureBatch
from specdec.train_eagle.unrolled_attention import UnrolledAttention

# Rank of a token behind the end of the text.
NO_TOKEN = -1


@torch.no_grad()
def token_ranks(head: EagleHead | Eagle3Head, readout: Readout, batch: FeatureBatch, depth: int) -> Tensor:
    """Ranks in one conversation, by the passes of training-time test (Li et al. 2025, section 3.2).

    A root is a token whose next one is in the conversation's mask. Below it the head drafts the tokens that the
    conversation goes on with, each from its own state of the one before: where its likeliest ones are these, that is
    what it drafts when it serves.

    Args:
        batch: of one conversation, no longer than the head has positions.

    Returns:
        int64 `[depth, roots]`, how many tokens are likelier to the head than the one that comes: 0 for its likeliest,
        `vocab_size` where it cannot propose it, `NO_TOKEN` where none comes.
    """
    llama, dtype = head.llama, head.fc.weight.dtype
    taps = [tap.to(dtype) for tap in batch.taps.chunk(len(head.taps), -1)] if head.taps else []
    features = head.feature_of(TargetOutput(batch.features.to(dtype), taps))[:-1]
    # Row r takes token r + 1 and the feature of token r, and predicts token r + 2.
    tokens, rows = batch.tokens, len(batch.tokens) - 1
    roots = batch.mask[2:].nonzero().flatten()
    attentions = [UnrolledAttention([rows], roots) for _ in range(llama.num_layers)]
    table = llama.rope.table(llama.head_dim, llama.max_position, torch.promote_types(dtype, torch.float32))
    table = table.to(tokens.device)
    hidden = head(tokens[1:], features, rotary_at(table, torch.arange(rows, device=tokens.device)), attentions)[roots]
    found = [_ranks(head, readout, hidden, tokens, roots + 2)]
    for step in range(1, depth):
        ahead = (roots + step).clamp_max(rows - 1)
        hidden = head(tokens[ahead + 1], hidden, rotary_at(table, ahead), attentions)
        found.append(_ranks(head, readout, hidden, tokens, roots + 2 + step))
    return torch.stack(found)


def _ranks(head: EagleHead | Eagle3Head, readout: Readout, hidden: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Of the tokens at `places`, by the states before them."""
    ranks = torch.full_like(places, NO_TOKEN)
    inside = places < len(tokens)
    if inside.any():
        scores = readout(head.read(hidden[inside])).full()
        own = scores.gather(1, tokens[places[inside]].unsqueeze(1))
        likelier = (scores > own).sum(1)
        ranks[inside] = likelier.where(own.squeeze(1) > float("-inf"), scores.shape[1])
    return ranks
