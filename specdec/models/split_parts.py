"""Parts of targets and draft models that are split over ranks, with what the ranks exchange in them."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.draft_heads.llama.llama_layer import DecoderLayer
from specdec.kernels.types.integers import ceil_div
from specdec.models.tp_plan import Span, TPPlan
from specdec.parallel.rank_group import RankGroup


def split_rows(layers: Iterable[DecoderLayer], plan: TPPlan, group: RankGroup) -> None:
    """Have decoder layers, which are made with a rank's sizes, sum their outputs over the ranks."""
    for layer in layers:
        if plan.attention:
            layer.reduce = group.all_reduce
        if plan.mlp:
            layer.mlp.reduce = group.all_reduce


class SplitEmbedding(nn.Embedding):
    """A token embedding of which each rank holds a part of the vocabulary.

    Args:
        vocab: tokens of this rank.
    """

    def __init__(self, vocab: Span, size: int, group: RankGroup) -> None:
        super().__init__(vocab.size, size, _weight=torch.empty(vocab.size, size))
        self.vocab, self.group = vocab, group

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, `[rows, size]`.

        Each rank looks up its own tokens, and the ranks are summed.
        """
        start, stop, _ = self.vocab
        is_elsewhere = (tokens < start) | (tokens >= stop)
        own = F.embedding((tokens - start).masked_fill_(is_elsewhere, 0), self.weight)
        return self.group.all_reduce(own.masked_fill_(is_elsewhere[:, None], 0))


def gathered(logits: Tensor, total: int, group: RankGroup) -> Tensor:
    """Return the logits of all ranks, `[rows, total]`; a collective, so all ranks must call it.

    Args:
        logits: `[rows, part]`, of this rank's `Shard.vocab`.
    """
    if not len(logits):
        return logits.new_empty(0, total)
    padding = ceil_div(total, group.size) - logits.shape[1]
    parts = group.all_gather(F.pad(logits, (0, padding)) if padding else logits)
    return torch.cat(parts, 1)[:, :total]
