"""The target's forward pass over a packed batch, the only one in the engine."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specdec.cache.kv_cache import KVCache
from specdec.draft_heads.heads.draft_head import CachedHead, TargetOutput
from specdec.draft_heads.llama.llama_layer import PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.execution.stage_exchange import StageExchange
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.fused import FusedTarget, TargetCache
from specdec.kernels.types.tree import TreeRow
from specdec.kernels.types.upload import Packet
from specdec.models.llama import LlamaModel
from specdec.models.sharded_llama import sharded
from specdec.verify.tree_batch import TreeBatch

if TYPE_CHECKING:
    # It brings Triton's kernels, which an engine on plain torch does without.
    from specdec.verify.pass_graphs import PassGraphs


class PreparedPass(Protocol):
    """A pass over rows; see `ModelRunner.prepare`."""

    def __call__(self, tokens: Tensor | None = None) -> Tensor: ...


# Positions that measurements and captures need at most, whatever the limit of requests.
LONGEST_MEASURED = 8192


class ModelRunner:
    """The target's weights and rotary table, and the one forward pass over them.

    Args:
        dtype: of the target's arithmetic, whatever the cache's.
        head: the draft head whose features the cache keeps of each token.
        longest: limit of a request's tokens.
        taps: target layers that a head in another process reads.
        words: 64-bit words of ancestor bits that the largest trees need. All steps have as many: kernels are compiled
            anew for another number.

    Attributes:
        graphs: captured passes; None where they are launched kernel by kernel.
        exchange: with other pipeline stages; None where there are none.
        one_call: the pass in one call; None where the kernel set does not have it, or not the head's feature.
    """

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        dtype: torch.dtype,
        head: CachedHead | None = None,
        longest: int = LONGEST_MEASURED,
        taps: Sequence[int] = (),
        words: int = 1,
    ) -> None:
        config = model.config
        self.model, self.cache, self.dtype, self.head, self.words = model, cache, dtype, head, words
        self.taps = head.taps if head else taps
        self.max_position = config.max_position
        positions = min(config.max_position, max(longest, LONGEST_MEASURED))
        self.rope = config.rope.table(config.head_dim, positions, dtype).to(cache.target.device)
        self.slopes = config.slopes(dtype, cache.target.device)
        self.graphs: PassGraphs | None = None
        self.exchange: StageExchange | None = None
        if model.num_stages > 1:
            self.exchange = StageExchange(sharded(model), self.taps, cache.target.device)
        self.one_call = self._one_call()

    def _one_call(self) -> FusedTarget | None:
        cache, head, features = self.cache, self.head, None
        if cache.kernels.passes is None:
            return None
        if head is not None and head.feature_size:
            features = head.feature_weights()
            if features is None:
                return None
        weights = self.model.fused_weights(features)
        if weights is None:
            return None
        return cache.kernels.passes.target(
            weights, TargetCache(cache.target, cache.features, self.rope, cache.block_size, cache.target_scales)
        )

    def use_head(self, head: CachedHead) -> None:
        """Compute the features for another head of the same shape from the next pass on."""
        if head.projects_features:
            # Captured passes compute features with the weights of the head before.
            self.graphs = None
        self.head = head
        self.one_call = self._one_call()

    def forward(self, parts: Sequence[TreeRow], trees: DraftTrees) -> Tensor:
        """Run a pass at once; see `prepare`."""
        packet = Packet(self.cache.target.device)
        run = self.prepare(parts, trees, packet)
        packet.send()
        return run()

    def prepare(self, parts: Sequence[TreeRow], trees: DraftTrees, packet: Packet) -> PreparedPass:
        """Return the pass over rows, which may run once the packet is sent.

        It returns logits `[sum of (num_scored + nodes), vocab_size]`, and stores keys, values and features in the
        cache. A stage before the last sends its output to the next one, and has no logits. Rows of one token each may
        be prepared before the host knows their tokens: the pass takes them, int64 `[rows]`, on the device, -1 for none.
        """
        one_call = self.one_call
        if one_call is not None:
            return lambda tokens=None: one_call(_with_tokens(parts, tokens), trees.read())
        groups = micro_batches(parts, trees, self.model.num_stages)
        passes = [self._prepare_group(*group, packet) for group in groups]

        def run(tokens: Tensor | None = None) -> Tensor:
            states = [group(tokens) for group in passes]
            if self.exchange is not None:
                self.exchange.flush()
            rows = states[0] if len(states) == 1 else torch.cat(states)
            if not len(rows):
                return rows.new_empty(0, self.model.config.vocab_size)
            logits: Tensor = self.model.output(rows)
            return logits

        return run

    def _prepare_group(self, parts: Sequence[TreeRow], trees: DraftTrees, packet: Packet) -> PreparedPass:
        """Return the decoder's pass, to what logits are made of, `[sum of (num_scored + nodes), hidden_size]`."""
        graphs = self.graphs
        run: Callable[[TreeBatch], Tensor] = self.features
        rows, exchange = sum(len(part.tokens) for part in parts) + sum(trees.sizes), self.exchange
        if graphs is None:
            packed = TreeBatch.pack_into(packet, parts, trees, self.cache.block_size, least_words=self.words)
        else:
            packed = graphs.pack(packet, parts, trees)
            run = graphs.pass_of(packed, packet)

        def scored_states(tokens: Tensor | None = None) -> Tensor:
            if tokens is not None:
                # Where no token can follow, the request ends.
                torch.clamp_min(tokens, 0, out=packed.batch.tokens[: len(tokens)])
            batch = packed.complete()
            states = run(batch) if exchange is None else exchange.run(run, batch, rows)
            return batch.scored(states) if self.model.is_last else states

        return scored_states

    def features(self, batch: TreeBatch) -> Tensor:
        """Return the decoder's output `[tokens, hidden_size]`; it waits for nothing, so it can be captured.

        Pipeline stages before the last add the inputs of tapped layers, `[tokens, (1 + taps) * hidden_size]`.
        """
        if self.model.adapters is not None:
            self.model.adapters.use(batch.rows)
        attentions = self._attentions(batch)
        rotary = rotary_at(self.rope, batch.positions)
        output: TargetOutput = self.model(batch.tokens, rotary, attentions, self.taps, batch.received)
        if self.head and self.head.feature_size:
            self.cache.store_features(batch.slots, self.head.feature_of(output))
        return output.features if self.model.is_last else torch.cat([output.features, *output.taps], 1)

    def _attentions(self, batch: TreeBatch) -> Iterator[PagedAttention]:
        """Yield the layers' attentions, each when its layer is reached."""
        cache = self.cache
        scales = cache.target_scales if cache.target_scales is not None else [None] * len(cache.target_layers)
        layers = zip(cache.target_layers, self.model.config.layer_windows, scales, strict=True)
        for kv, window, own in layers:
            yield PagedAttention(kv, batch.slots, batch.rows, cache.kernels, window, own, self.slopes)

    @torch.inference_mode()
    def run_dummy(self, rows: Sequence[TreeRow], trees: DraftTrees) -> None:
        """Run a pass that nothing reads, and wait for it."""
        self.forward(rows, trees)
        self.wait()

    def wait(self) -> None:
        """Wait until the device has done all that it was asked."""
        if self.cache.target.device.type == "cuda":
            torch.cuda.synchronize(self.cache.target.device)


def micro_batches(
    parts: Sequence[TreeRow], trees: DraftTrees, count: int
) -> list[tuple[Sequence[TreeRow], DraftTrees]]:
    """Cut rows, with their trees, into up to `count` groups of neighbours with about as many tokens each.

    The groups follow each other through the pipeline stages.
    """
    if count == 1:
        return [(parts, trees)]
    ends = [0]
    for part, size in zip(parts, trees.sizes, strict=True):
        ends.append(ends[-1] + len(part.tokens) + size)
    cuts = [0]
    for group in range(1, count + 1):
        # The end of the row that takes the group past its share of all tokens.
        cut = next(row for row, end in enumerate(ends) if end * count >= ends[-1] * group)
        if cut > cuts[-1]:
            cuts.append(cut)
    return [(parts[start:stop], trees.select(range(start, stop))) for start, stop in pairwise(cuts)]


def _with_tokens(parts: Sequence[TreeRow], tokens: Tensor | None) -> Sequence[TreeRow]:
    """Return rows of one token each with these tokens, if there are any."""
    if tokens is None:
        return parts
    return [part._replace(tokens=[max(token, 0)]) for part, token in zip(parts, tokens.tolist(), strict=True)]
