"""Drafter that runs its head once per level: EAGLE heads and small models."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import DraftLevels, own_bits
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.draft_heads.llama.llama_layer import PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.kernels.types.fused import DraftingCache, FusedDrafting, FusedPasses
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.tree_search import Frontier
from specdec.kernels.types.types import Candidates, Stream, TopK
from specdec.verify.transforms import NodeRows, processed_logits
from specdec.verify.tree_batch import TreeBatch


class ModelDrafter(TreeDrafter[Tensor]):
    """EAGLE-2 drafting: a pass of the head over each level's frontier gives the states of the next.

    An EAGLE head's row of token i takes embedding(x_i) and the target's feature f_{i-1}, is stored at entry i of
    the request's cache, and predicts x_{i+1}. Entry 0 stays empty. A small Llama's takes x_i alone, from entry 0 on.
    """

    def _fused(self, passes: FusedPasses, cache: DraftingCache) -> FusedDrafting | None:
        weights, readout = self.head.drafting_weights(), self.readout
        if weights is None:
            return None
        return passes.drafting(weights, readout.projection, self.llama.vocab_size, readout.tokens, cache)

    def _roots(self, states: Tensor, batch: TreeBatch, last: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return the head's state after each last token."""
        return states if last is None else states.index_select(0, last)

    def read(self, batch: TreeBatch) -> Tensor:
        """See `TreeDrafter.read`."""
        sources = batch.slots if batch.sources is None else batch.sources
        features = self.features.index_select(0, sources)
        return self._forward(batch.tokens, features, batch.positions, batch.slots, batch.rows)

    def _pass_bits(self, depth: int, width: int) -> Tensor:
        if width not in self._own_bits:
            self._own_bits[width] = own_bits(self.shape.depth - 1, width, self.kv.device)
        return self._own_bits[width][: depth - 1]

    def _begin(self, levels: DraftLevels, roots: Tensor, rows: Sequence[DraftRow], *, drawn: bool) -> Tensor:  # noqa: ARG002
        """Return the head's states of the roots, `[rows, hidden_size]`."""
        return roots

    def _children(
        self, state: Tensor, levels: DraftLevels, level: int, rows: Sequence[DraftRow], paths: Callable[[], Tensor]
    ) -> TopK:
        scores = self._scores(state, levels, level, rows, paths)
        noise = levels.noise_after(level - 1)
        return self.kernels.search.perturbed_top_k(scores, noise, self.branching, Stream.TARGET, 0)

    def _log_q(
        self, state: Tensor, levels: DraftLevels, level: int, rows: Sequence[DraftRow], paths: Callable[[], Tensor]
    ) -> Tensor:
        return torch.log_softmax(self._scores(state, levels, level, rows, paths).full(), -1)

    def _expand(self, levels: DraftLevels, frontier: Frontier, state: Tensor, level: int) -> Tensor:
        """Run the head over the frontier; return its state after each frontier node, `[rows * width, hidden]`."""
        num_rows = len(frontier.tokens)
        before = state.view(num_rows, -1, state.shape[-1])
        size = before.shape[-1]
        features = before.gather(1, frontier.parents[:, :, None].expand(-1, -1, size)).view(-1, size)
        ragged = levels.ragged(frontier, level)
        tokens, positions = frontier.tokens.flatten(), levels.positions_at(level)
        return self._forward(tokens, features, positions, levels.slots[level - 1], ragged)

    def _forward(self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor, rows: RaggedRows) -> Tensor:
        self._adapt(rows)
        layers = zip(self.kv, self.head.windows, strict=True)
        attentions = [
            PagedAttention(kv, slots, rows, self.kernels, window, slopes=self.slopes) for kv, window in layers
        ]
        hidden: Tensor = self.head(tokens, features, rotary_at(self.rope, positions), attentions)
        return hidden

    def _scores(
        self, hidden: Tensor, levels: DraftLevels, level: int, rows: Sequence[DraftRow], paths: Callable[[], Tensor]
    ) -> Candidates:
        """Return the processed logits of `rows * width` nodes; `paths` gives `[rows, width, level - 1]` tokens."""
        found = self.readout(self.head.read(hidden))
        sampling = levels.sampling_at(level - 1)
        if sampling is not None:
            return found._replace(scores=sampling.process(found.scores, self.kernels))
        width = len(found.scores) // len(rows)
        parts = [NodeRows(row.context, width, partial(_paths_of, paths, i)) for i, row in enumerate(rows)]
        return Candidates(processed_logits(found.full(), parts, self.kernels), found.vocab_size)


def _paths_of(paths: Callable[[], Tensor], row: int) -> Tensor:
    return paths()[row]
