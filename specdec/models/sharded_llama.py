"""One rank's shard of a target: a range of its layers, columns and rows of their weights, a part of the vocabulary."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specdec.draft_heads.heads.draft_head import TargetOutput, TargetParts
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.kernels.kernel_set import KernelSet
from specdec.models.checkpoint import read_settings, read_weights
from specdec.models.llama import LlamaModel, built_llama, check_whole, normalised, read_llama_config, untied
from specdec.models.split_parts import SplitEmbedding, gathered, split_rows
from specdec.models.tp_plan import Shard, TPPlan, plan_of
from specdec.parallel.rank_layout import RankGroups


class ShardedLlama(LlamaModel):
    """One rank's shard of a Llama. Its `output` returns the logits of this rank's part of the vocabulary.

    Hidden states are whole and bitwise equal on all ranks of a stage, so draft heads read them without a collective.
    Between stages they travel with the inputs of tapped layers, which the head reads behind the last stage.

    Args:
        folder: the checkpoint, from which a draft head that shares the target's weights reads them whole.

    Attributes:
        config: sizes of the shard; the vocabulary's is the whole model's.
        kernels: of the shard: passes in one call leave no place for what the ranks exchange.
        dtype: of hidden states.
    """

    kernels: KernelSet
    dtype: torch.dtype

    def __init__(self, shard: Shard, groups: RankGroups, folder: Path) -> None:
        super().__init__(replace(shard.config, vocab_size=shard.vocab.size))
        self.config = shard.config
        self.shard, self.folder = shard, folder
        self.group, self.stages = group, _ = groups
        self.first_layer, self.is_last, self.num_stages = shard.layers.start, shard.is_last, self.stages.size
        if not shard.holds_embedding:
            del self.embed_tokens
        elif shard.plan.vocabulary:
            self.embed_tokens = SplitEmbedding(shard.vocab, self.config.hidden_size, group)
        if not shard.is_last:
            del self.norm
            self.lm_head = None
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        split_rows(self.layers, shard.plan, group)

    @property
    def whole_config(self) -> LlamaConfig:
        return self.shard.whole

    def enter(self, tokens: Tensor, tap_layers: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the input of the shard's first layer, which the stage before sends if there is one."""
        if self.shard.is_first:
            return super().enter(tokens, tap_layers)
        earlier = sorted(layer for layer in tap_layers if layer < self.first_layer)
        shape = 1 + len(earlier), len(tokens), self.config.hidden_size
        sent = torch.empty(shape, dtype=self.dtype, device=tokens.device)
        hidden, *taps = self.stages.receive(sent, self.stages.rank - 1)
        return hidden, dict(zip(earlier, taps, strict=True))

    def leave(self, hidden: Tensor, taps: dict[int, Tensor], tap_layers: Sequence[int]) -> TargetOutput:
        """Return the decoder's output, or send the hidden states to the next stage and return them."""
        if self.is_last:
            return super().leave(hidden, taps, tap_layers)
        self.stages.send(torch.stack([hidden, *(taps[layer] for layer in sorted(taps))]), self.stages.rank + 1)
        return TargetOutput(hidden, [])

    def flush(self) -> None:
        """Wait until the next stage has taken what was sent to it."""
        self.stages.flush()

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

    def prepare(self, kernels: KernelSet) -> bool:
        """Prepare the output matrix, where the shard has it; the other parts prepare themselves."""
        self.kernels, self.dtype = kernels, next(self.parameters()).dtype
        return super().prepare(kernels) if self.is_last else False


def load_shard(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    groups: RankGroups,
    window: int | None = None,
) -> ShardedLlama:
    """Load a rank's shard of a checkpoint, strictly. Files are mapped into memory, and only the shard is read.

    Args:
        window: as for `load_llama`.

    Raises:
        CheckpointError: see `load_llama`.
        ValueError: the model cannot be split over so many ranks; see `Shard.of`.
    """
    config = read_llama_config(folder).with_window(window)
    tensor, stages = groups
    plan = plan_of(read_settings(folder), config) if tensor.size > 1 else TPPlan({})
    shard = Shard.of(config, tensor.rank, tensor.size, plan, stages.rank, stages.size)
    shard.check_groups(kernels.rounded_group)
    tensors = untied(folder, config, read_weights(folder, dtype))
    check_whole(folder, config, tensors)
    own = {held: shard.cut(name, each) for name, each in tensors.items() if (held := shard.own_name(name)) is not None}
    kernels = replace(kernels, fused_target=None, fused_layer=kernels.fused_layer if tensor.size == 1 else None)
    return built_llama(folder, shard.config, lambda: ShardedLlama(shard, groups, folder), own, dtype, device, kernels)
