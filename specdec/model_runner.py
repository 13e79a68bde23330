"""Runs the target over a packed batch: the only forward pass of it in the engine."""

import time
from statistics import median

import torch
from torch import Tensor

from specdec.block_move import BlockMove, MoveKind
from specdec.draft_heads.llama_layer import PagedAttention
from specdec.draft_heads.rope import rotary_at
from specdec.kv_cache import KVCache
from specdec.models.llama import LlamaModel
from specdec.preemption_cost import PreemptionCost
from specdec.verify.tree import DraftTree
from specdec.verify.tree_batch import TreeBatch, TreeRow

# Tokens and rounds by which the cost of a preemption is measured.
MEASURED_TOKENS = 256
MEASURED_ROUNDS = 5


class ModelRunner:
    """Owner of the target's weights and rotary table."""

    def __init__(self, model: LlamaModel, cache: KVCache) -> None:
        config = model.config
        self.model, self.cache = model, cache
        device, dtype = cache.target.device, cache.target.dtype
        self.rope = config.rope.table(config.head_dim, config.max_position, dtype).to(device)

    def forward(self, batch: TreeBatch) -> Tensor:
        """Logits `[logit rows, vocab_size]`; keys, values and features go into the cache."""
        attentions = [PagedAttention(kv, batch.slots, batch.rows) for kv in self.cache.target_layers]
        output = self.model(batch.tokens, rotary_at(self.rope, batch.positions), attentions)
        self.cache.store_features(batch.slots, output.features)
        wanted = batch.logit_rows
        if wanted.numel() == 0:
            return batch.tokens.new_empty(0, self.model.config.vocab_size, dtype=output.features.dtype)
        rows = output.features if wanted.numel() == len(batch.tokens) else output.features.index_select(0, wanted)
        logits: Tensor = self.model.output(rows)
        return logits

    @torch.inference_mode()
    def run_dummy(self, num_tokens: int) -> None:
        """A pass over one chain of `num_tokens` tokens, all of them scored; what the cache holds is lost."""
        cache = self.cache
        blocks = range(-(-num_tokens // cache.block_size))
        row = TreeRow([0] * num_tokens, DraftTree(), 0, blocks, num_scored=num_tokens)
        self.forward(TreeBatch.pack([row], cache.block_size, cache.target.device))
        self._wait()

    @torch.inference_mode()
    def preemption_cost(self) -> PreemptionCost:
        """Times a pass over a chunk and copies of blocks to host memory, on the still empty cache."""
        cache = self.cache
        tokens = min(MEASURED_TOKENS, cache.num_blocks * cache.block_size)
        out = [BlockMove(MoveKind.SWAP_OUT, i, i) for i in range(min(cache.num_blocks, cache.num_host_blocks, 16))]

        def seconds(work: str) -> float:
            start = time.perf_counter()
            if work == "pass":
                self.run_dummy(tokens)
            else:
                cache.carry_out(out)
                self._wait()
            return time.perf_counter() - start

        rounds = [(seconds("pass"), seconds("swap")) for _ in range(1 + MEASURED_ROUNDS)][1:]
        passes, swaps = zip(*rounds, strict=True)
        return PreemptionCost(median(passes) / tokens, median(swaps) / len(out))

    def _wait(self) -> None:
        if self.cache.target.device.type == "cuda":
            torch.cuda.synchronize(self.cache.target.device)
