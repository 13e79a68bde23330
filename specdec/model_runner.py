"""Runs the target over a packed batch: the only forward pass of it in the engine."""

from typing import NamedTuple

from torch import Tensor

from specdec.draft_heads.llama_layer import PagedAttention
from specdec.draft_heads.rope import rotary_at
from specdec.kv_cache import KVCache
from specdec.models.llama import LlamaModel
from specdec.verify.tree_batch import TreeBatch


class StepOutput(NamedTuple):
    """Of one forward pass.

    Attributes:
        features: `[rows, hidden_size]`, of all packed rows.
        logits: `[logit rows, vocab_size]`.
    """

    features: Tensor
    logits: Tensor


class ModelRunner:
    """Owner of the target's weights and rotary table."""

    def __init__(self, model: LlamaModel, cache: KVCache) -> None:
        config = model.config
        self.model, self.cache = model, cache
        device, dtype = cache.target.device, cache.target.dtype
        self.rope = config.rope.table(config.head_dim, config.max_position, dtype).to(device)

    def forward(self, batch: TreeBatch) -> StepOutput:
        attentions = [PagedAttention(kv, batch.slots, batch.rows) for kv in self.cache.target_layers]
        output = self.model(batch.tokens, rotary_at(self.rope, batch.positions), attentions)
        wanted = batch.logit_rows
        if wanted.numel() == 0:
            return StepOutput(output.features, output.features.new_empty(0, self.model.config.vocab_size))
        rows = output.features if wanted.numel() == len(batch.tokens) else output.features.index_select(0, wanted)
        return StepOutput(output.features, self.model.output(rows))
