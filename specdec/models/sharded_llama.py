"""One rank's shard of a target: a range of its layers, columns and rows of their weights, a part of the vocabulary."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.draft_heads.heads.draft_head import TargetOutput, TargetParts
from specdec.draft_heads.llama.llama_layer import LlamaLayer
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.linear import Linear
from specdec.kernels.projection import Product
from specdec.models.checkpoint import read_settings, read_weights
from specdec.models.llama import LlamaModel, built_llama, check_whole, read_llama_config, untied
from specdec.models.rank_group import RankGroup
from specdec.models.rank_layout import RankGroups
from specdec.models.tp_plan import Shard, TPPlan, plan_of


class RowSplitLinear(Linear):
    """A linear layer whose inputs are split over ranks; the ranks' outputs are summed."""

    def __init__(self, like: nn.Linear, group: RankGroup) -> None:
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None)
        self.group = group

    def inference_form(self, kernels: KernelSet) -> Product:
        """Return the product followed by the sum over ranks."""
        return SummedProduct(super().inference_form(kernels), self.group)


class SummedProduct:
    """A product with a rank's own inputs, summed over the ranks by one all-reduce."""

    def __init__(self, product: Product, group: RankGroup) -> None:
        self.product, self.group = product, group
        self.weight, self.bias, self.size = product.weight, product.bias, product.size

    @property
    def keeps_weight(self) -> bool:
        return self.product.keeps_weight

    def like(self, weight: Tensor) -> Product:
        """Return the same product of another weight."""
        return SummedProduct(self.product.like(weight), self.group)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: each rank's `[rows, in_features / ranks]` to `[rows, out_features]`, the same on all ranks."""
        return self.group.all_reduce(self.product(x))


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
        if not shard.is_last:
            del self.norm
            self.lm_head = None
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        for layer in self.layers:
            assert isinstance(layer, LlamaLayer)
            if shard.plan.attention:
                layer.o_proj = RowSplitLinear(layer.o_proj, group)
            if shard.plan.mlp:
                layer.down_proj = RowSplitLinear(layer.down_proj, group)

    @property
    def windows(self) -> tuple[int, ...]:
        return self.shard.whole.layer_windows

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

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, `[rows, hidden_size]`.

        Each rank looks up the tokens of its part of the vocabulary, and the ranks are summed.
        """
        if not self.shard.plan.vocabulary:
            return super().embed(tokens)
        start, stop, _ = self.shard.vocab
        is_elsewhere = (tokens < start) | (tokens >= stop)
        own = F.embedding((tokens - start).masked_fill_(is_elsewhere, 0), self.embed_tokens.weight)
        return self.group.all_reduce(own.masked_fill_(is_elsewhere[:, None], 0))

    def whole(self, logits: Tensor) -> Tensor:
        """Gather the logits of all ranks, `[rows, vocab_size]`; a collective, so all ranks must call it."""
        if not self.shard.plan.vocabulary:
            return logits
        if not len(logits):
            return logits.new_empty(0, self.shard.whole.vocab_size)
        padding = self.shard.vocab_chunk - logits.shape[1]
        parts = self.group.all_gather(F.pad(logits, (0, padding)) if padding else logits)
        return torch.cat(parts, 1)[:, : self.shard.whole.vocab_size]

    @property
    def parts(self) -> TargetParts:
        """Sizes, embedding and output matrix of the whole model, read from the checkpoint at each use."""
        weight = self.norm.weight
        tensors = read_weights(self.folder, weight.dtype)

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
    folder: Path, dtype: torch.dtype, device: torch.device, kernels: KernelSet, groups: RankGroups
) -> ShardedLlama:
    """Load a rank's shard of a checkpoint, strictly. Files are mapped into memory, and only the shard is read.

    Raises:
        CheckpointError: see `load_llama`.
        ValueError: the model cannot be split over so many ranks; see `Shard.of`.
    """
    config = read_llama_config(folder)
    tensor, stages = groups
    plan = plan_of(read_settings(folder)) if tensor.size > 1 else TPPlan({})
    shard = Shard.of(config, tensor.rank, tensor.size, plan, stages.rank, stages.size)
    tensors = untied(folder, config, read_weights(folder, dtype))
    check_whole(folder, config, tensors)
    own = {held: shard.cut(name, each) for name, each in tensors.items() if (held := shard.own_name(name)) is not None}
    kernels = replace(kernels, fused_target=None, fused_layer=kernels.fused_layer if tensor.size == 1 else None)
    return built_llama(folder, shard.config, lambda: ShardedLlama(shard, groups, folder), own, dtype, device, kernels)
