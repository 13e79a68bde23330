"""One rank's shard of a target, and the parts of it and of draft models that exchange something with other ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.draft_heads.heads.draft_head import TargetOutput, TargetParts
from specdec.draft_heads.llama.llama_layer import DecoderLayer
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.fused import FeatureWeights
from specdec.kernels.types.integers import ceil_div
from specdec.models.checkpoint import read_settings, read_weights
from specdec.models.llama import (
    LlamaModel,
    LlamaWeights,
    built_llama,
    check_whole,
    normalised,
    read_llama_config,
    untied,
    with_vocab_size,
)
from specdec.models.tp_plan import Shard, Span, TPPlan, plan_of
from specdec.parallel.rank_group import RankGroup
from specdec.parallel.rank_layout import RankGroups


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


def sharded(model: LlamaModel) -> "ShardedLlama":
    """Return a model as the shard that it is."""
    assert model.shard is not None
    return cast("ShardedLlama", model)


class ShardedLlama(LlamaModel):
    """One rank's shard of a Llama. Its `output` returns the logits of this rank's part of the vocabulary.

    Hidden states are whole and bitwise equal on all ranks of a stage, so draft heads read them without a collective.
    Between stages they travel with the inputs of tapped layers, which the head reads behind the last stage.

    Args:
        folder: the checkpoint, from which a draft head that shares the target's weights reads them whole.

    Attributes:
        config: sizes of the shard; the vocabulary's is the whole model's.
        dtype: of hidden states.
    """

    shard: Shard

    def __init__(
        self, weights: LlamaWeights, kernels: KernelSet, shard: Shard, groups: RankGroups, folder: Path
    ) -> None:
        self.shard, self.folder, self.kernels = shard, folder, kernels
        self.group, self.stages = groups
        self.first_layer, self.is_last, self.num_stages = shard.layers.start, shard.is_last, self.stages.size
        super().__init__(weights, kernels)
        self.config = shard.config

    def fused_weights(self, features: FeatureWeights | None) -> None:
        """Return no parts: a pass in one call leaves no place for what the ranks exchange."""

    def enter(
        self, tokens: Tensor, tap_layers: Sequence[int], received: Tensor | None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if received is None:
            return super().enter(tokens, tap_layers, None)
        earlier = sorted(layer for layer in tap_layers if layer < self.first_layer)
        hidden, *taps = received.view(len(tokens), 1 + len(earlier), -1).transpose(0, 1).contiguous()
        return hidden, dict(zip(earlier, taps, strict=True))

    def leave(self, hidden: Tensor, taps: dict[int, Tensor], tap_layers: Sequence[int]) -> TargetOutput:
        """Return the decoder's output, or that of the stage's layers with what later stages read besides."""
        if self.is_last:
            return super().leave(hidden, taps, tap_layers)
        return TargetOutput(hidden, [taps[layer] for layer in sorted(taps)])

    def whole(self, logits: Tensor) -> Tensor:
        """Gather the logits of all ranks, `[rows, vocab_size]`; a collective, so all ranks must call it."""
        return gathered(logits, self.shard.whole.vocab_size, self.group) if self.shard.plan.vocabulary else logits

    @property
    def parts(self) -> TargetParts:
        """Sizes, embedding and output matrix of the whole model, read from the checkpoint at each use."""
        weight = self.norm.weight
        tensors = read_weights(self.folder, weight.dtype)
        if self.shard.whole.normalised_head:
            tensors["lm_head.weight"] = normalised(tensors["lm_head.weight"], weight.dtype)

        def whole(name: str) -> Tensor:
            return tensors[name].to(weight.device, weight.dtype, copy=True)

        embedding = whole("embed_tokens.weight")
        matrix = embedding if self.shard.whole.tie_word_embeddings else whole("lm_head.weight")
        return TargetParts(embedding, self.kernels.projection(matrix, None), self.shard.whole)


def shard_weights(shard: Shard, group: RankGroup) -> LlamaWeights:
    """Return the weights of a shard, without numbers where they are made on the meta device."""
    weights = LlamaWeights(replace(shard.config, vocab_size=shard.vocab.size))
    if not shard.holds_embedding:
        del weights.embed_tokens
    elif shard.plan.vocabulary:
        weights.embed_tokens = SplitEmbedding(shard.vocab, shard.config.hidden_size, group)
    if not shard.is_last:
        del weights.norm
        weights.lm_head = None
    split_rows(weights.decoder_layers, shard.plan, group)
    return weights


def load_shard(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    groups: RankGroups,
    window: int | None = None,
    vocab_size: int | None = None,
) -> ShardedLlama:
    """Load a rank's shard of a checkpoint, strictly. Files are mapped into memory, and only the shard is read.

    Args:
        window, vocab_size: as for `load_llama`.

    Raises:
        CheckpointError: see `load_llama`.
        ValueError: the model cannot be split over so many ranks; see `Shard.of`.
    """
    config = read_llama_config(folder).with_window(window)
    tensor, stages = groups
    plan = plan_of(read_settings(folder), config) if tensor.size > 1 else TPPlan({})
    tensors = untied(folder, config, read_weights(folder, dtype))
    check_whole(folder, config, tensors)
    config, tensors = with_vocab_size(config, tensors, vocab_size)
    shard = Shard.of(config, tensor.rank, tensor.size, plan, stages.rank, stages.size)
    shard.check_groups(kernels.limits.rounded_group)
    own = {held: shard.cut(name, each) for name, each in tensors.items() if (held := shard.own_name(name)) is not None}
    served = partial(ShardedLlama, shard=shard, groups=groups, folder=folder)
    return built_llama(folder, shard.config, partial(shard_weights, shard, tensor), served, own, dtype, device, kernels)
