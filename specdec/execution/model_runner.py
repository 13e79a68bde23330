"""Runs the target over a packed batch: the only forward pass of it in the engine."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.cache.kv_cache import KVCache
from specdec.cache.kv_cache_manager import BlockMove, MoveKind
from specdec.draft_heads.heads.draft_head import DraftHead, TargetOutput
from specdec.draft_heads.llama.llama_layer import PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.models.llama import LlamaModel
from specdec.scheduling.step_cost import PreemptionCost
from specdec.verify.draft_trees import DraftTrees, HostTrees
from specdec.verify.tree import ROOT, DraftTree
from specdec.verify.tree_batch import TreeBatch, TreeRow

if TYPE_CHECKING:
    # It brings Triton's kernels, which an engine on plain torch does without.
    from specdec.execution.step_graphs import StepGraphs

# Tokens and rounds by which the cost of a preemption is measured.
MEASURED_TOKENS = 256
MEASURED_ROUNDS = 5
# Tokens of the longest context that measurements and captures run with, whatever requests may have.
LONGEST_MEASURED = 8192


class ModelRunner:
    """Owner of the target's weights and rotary table.

    Args:
        head: whose features the cache keeps of each token.
        longest: tokens a request may have.

    Attributes:
        graphs: of the pass, where there are any.
    """

    def __init__(
        self, model: LlamaModel, cache: KVCache, head: DraftHead | None = None, longest: int = LONGEST_MEASURED
    ) -> None:
        config = model.config
        self.model, self.cache, self.head = model, cache, head
        device, dtype = cache.target.device, cache.target.dtype
        self.max_position = config.max_position
        positions = min(config.max_position, max(longest, LONGEST_MEASURED))
        self.rope = config.rope.table(config.head_dim, positions, dtype).to(device)
        self.graphs: StepGraphs | None = None

    def forward(self, parts: Sequence[TreeRow], trees: DraftTrees) -> Tensor:
        """Logits `[sum of (num_scored + nodes), vocab_size]`; keys, values and features go into the cache."""
        run: Callable[[TreeBatch], Tensor] = self.features
        padding = 0
        if self.graphs is not None:
            run, padding = self.graphs, self.graphs.padding(sum(len(row.tokens) for row in parts) + sum(trees.sizes))
        if padding:
            parts = [*parts, TreeRow([0] * padding, 0, self.cache.null_block_table(padding), 0)]
        batch = TreeBatch.pack(parts, trees, self.cache.block_size, self.cache.target.device)
        features = run(batch)
        wanted = batch.logit_rows
        if wanted.numel() == 0:
            return features.new_empty(0, self.model.config.vocab_size)
        rows = features if wanted.numel() == len(batch.tokens) else features.index_select(0, wanted)
        logits: Tensor = self.model.output(rows)
        return logits

    def features(self, batch: TreeBatch) -> Tensor:
        """The decoder's `[tokens, hidden_size]`; it waits for nothing, so that it can be captured."""
        cache = self.cache
        attentions = [PagedAttention(kv, batch.slots, batch.rows, cache.kernels) for kv in cache.target_layers]
        taps = self.head.taps if self.head else ()
        output: TargetOutput = self.model(batch.tokens, rotary_at(self.rope, batch.positions), attentions, taps)
        if self.head and self.head.feature_size:
            cache.store_features(batch.slots, self.head.feature_of(output))
        return output.features

    def run_dummy(self, num_tokens: int) -> None:
        """Run a pass over one chain of `num_tokens` tokens, all of them scored, in the null block."""
        chain = TreeRow([0] * num_tokens, 0, self.cache.null_block_table(num_tokens), num_scored=num_tokens)
        self._run_dummy([chain], DraftTree())

    def run_dummy_rows(self, num_rows: int, context: int, nodes: int = 0) -> None:
        """Run a pass over rows of one token after `context` others, with `nodes` draft nodes under each."""
        tree = DraftTree(tuple(range(nodes)), (ROOT,) * nodes)
        self._run_dummy([TreeRow([0], context, self.cache.null_block_table(context + 1 + nodes), 1)] * num_rows, tree)

    @torch.inference_mode()
    def _run_dummy(self, rows: list[TreeRow], tree: DraftTree) -> None:
        self.forward(rows, HostTrees([tree] * len(rows)))
        self.wait()

    @torch.inference_mode()
    def preemption_cost(self) -> PreemptionCost:
        """Times a pass over a chunk and copies of blocks to host memory, on the still empty cache."""
        cache, tokens = self.cache, min(MEASURED_TOKENS, self.max_position)
        out = [BlockMove(MoveKind.SWAP_OUT, i, i) for i in range(min(cache.num_blocks, cache.num_host_blocks, 16))]

        def seconds(work: str) -> float:
            start = time.perf_counter()
            if work == "pass":
                self.run_dummy(tokens)
            else:
                cache.apply_moves(out)
                self.wait()
            return time.perf_counter() - start

        rounds = [(seconds("pass"), seconds("swap")) for _ in range(1 + MEASURED_ROUNDS)][1:]
        passes, swaps = zip(*rounds, strict=True)
        return PreemptionCost(median(passes) / tokens, median(swaps) / len(out))

    def wait(self) -> None:
        """Until the device has done all it was asked."""
        if self.cache.target.device.type == "cuda":
            torch.cuda.synchronize(self.cache.target.device)
