"""Drafter with a block head: one pass gives the candidates of all levels, and an edge scorer which follows which."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.draft_heads.drafting.draft_levels import DraftLevels
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow, Proposal
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.draft_heads.heads.block_head import BlockForm
from specdec.draft_heads.heads.edge_scorers import CANDIDATES
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.llama_layer import PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.adapters import AdapterBank
from specdec.kernels.types.fused import DraftingCache, FusedDrafting, FusedPasses
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.ragged_rows import WORD_BITS
from specdec.kernels.types.tree import split_words
from specdec.kernels.types.tree_search import Frontier
from specdec.kernels.types.types import Candidates, Stream, TopK
from specdec.kernels.types.upload import upload
from specdec.verify.transforms import NodeRows, processed_logits
from specdec.verify.tree_batch import TreeBatch


class Lattice(NamedTuple):
    """Candidates of all slots of a batch of blocks.

    Attributes:
        hidden: `[rows, slots, hidden_size]`, the slots' normed states.
        tokens: int64 `[rows, slots, candidates]`.
        scores: of the same shape, processed logits without edges; with the noise of the slot's position in a search.
        rest: `[rows, slots]`, the log-sum-exp of the other tokens' scores.
        successors: `[rows, slots, candidates, rank]` of the edge scorer; None without one.
        temperatures: `[rows, 1]`, which edges are divided by; None where all are 1.
    """

    hidden: Tensor
    tokens: Tensor
    scores: Tensor
    rest: Tensor
    successors: Tensor | None
    temperatures: Tensor | None


class Paths(NamedTuple):
    """The paths to the frontier's nodes, and what may follow them.

    Attributes:
        scores: `[rows, width, candidates]`, the next slot's candidates with the edges from each path.
        states: `[rows, width, state_size]`, what the edge scorer hands on.
    """

    lattice: Lattice
    scores: Tensor
    states: Tensor


class BlockDrafter(TreeDrafter[Paths]):
    """Trees over the candidates of one pass of a block head.

    The head's cache holds the context rows of known tokens, entry i that of token i - 1. The rows of a block lie
    behind the known tokens while it is drafted, at the rotary positions from the last known token's on.

    Levels cost nothing after the pass. Still, nodes that are reached too seldom cost the target's pass their rows, so
    the search ends like that of a head by levels, at `DraftShape.min_reach`; the best nodes of all are kept.

    Args:
        head: the block head; for the other arguments see `TreeDrafter`.
    """

    head: BlockForm

    def __init__(
        self,
        head: BlockForm,
        readout: MatrixReadout,
        kv: Tensor,
        features: Tensor | None,
        block_size: int,
        dtype: torch.dtype,
        shape: DraftShape,
        proposal: Proposal,
        kernels: KernelSet,
        adapters: AdapterBank | None = None,
    ) -> None:
        self.scorer = scorer = head.edge_scorer
        # The scorer's row of each of the target's tokens, where it has some only.
        self._scorer_rows: Tensor | None = None
        if scorer is not None and head.draft_tokens is not None and len(scorer.successors) < head.llama.vocab_size:
            self._scorer_rows = torch.zeros(head.llama.vocab_size, dtype=torch.int64, device=kv.device)
            self._scorer_rows[head.draft_tokens] = torch.arange(len(head.draft_tokens), device=kv.device)
        super().__init__(head, readout, kv, features, block_size, dtype, shape, proposal, kernels, adapters)
        rows, device = head.config.block_size, kv.device
        most = CANDIDATES if scorer is None else scorer.candidates
        self.num_candidates = max(self.branching, min(most, readout.size))
        words = ceil_div(rows, WORD_BITS)
        both, causal = [(1 << rows) - 1] * rows, [(2 << row) - 1 for row in range(rows)]
        # By whether a layer is causal.
        self._bits = [upload([split_words(bits, words) for bits in way], device) for way in (both, causal)]
        self._offsets = torch.arange(rows, device=device)

    def _fused(self, passes: FusedPasses, cache: DraftingCache) -> FusedDrafting | None:
        weights, readout = self.head.block_weights(), self.readout
        if weights is None:
            return None
        size = self.llama.vocab_size
        return passes.block(weights, readout.projection, size, readout.tokens, self._scorer_rows, cache)

    def _roots(self, states: Tensor, batch: TreeBatch, last: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return each last token, int64 `[rows, 1]`."""
        return (batch.tokens if last is None else batch.tokens.index_select(0, last))[:, None]

    def read(self, batch: TreeBatch) -> Tensor:
        """Write keys and values of what the target's features say; see `TreeDrafter.read`."""
        assert batch.sources is not None
        self._adapt(batch.rows)
        rotary, features = rotary_at(self.rope, batch.positions), self.features.index_select(0, batch.sources)
        for kv, stored in zip(self.kv, self.head.context(features).unbind(1), strict=True):
            self.kernels.rotary_store(stored.contiguous(), *rotary, kv, batch.slots, 0, None, None)
        return features[:, :0]

    def _pass_bits(self, depth: int, width: int) -> Tensor:  # noqa: ARG002
        """Return the rows of the block that each of its rows sees, in layers that are not causal."""
        return self._bits[0][None, : self.head.config.rows_for(depth)]

    def _begin(self, levels: DraftLevels, roots: Tensor, rows: Sequence[DraftRow], *, drawn: bool) -> Paths:
        """Run the pass, and choose the candidates of all slots."""
        config, num_rows, width = self.head.config, levels.num_rows, levels.width
        masks = torch.full_like(roots, config.mask_token).expand(-1, width - 1)
        tokens = torch.cat([roots, masks], 1).flatten()
        seen = [levels.block_rows(bits[:width]) for bits in self._bits]
        attentions = [
            PagedAttention(kv, levels.slots[0], seen[causal], self.kernels, window)
            for kv, causal, window in zip(self.kv, config.causal, config.windows, strict=True)
        ]
        self._adapt(seen[0])
        rotary = rotary_at(self.rope, levels.positions + self._offsets[:width].repeat(num_rows))
        found: Tensor = self.head(tokens, rotary, attentions)
        slots = slice(config.first_row, config.first_row + levels.depth)
        hidden = found.view(num_rows, width, -1)[:, slots]
        lattice = self._lattice(levels, hidden, rows, drawn=drawn)
        states = hidden.new_zeros(num_rows, 1, self.scorer.state_size if self.scorer else 0)
        return self._scored(lattice, roots, states, 0)

    def _lattice(self, levels: DraftLevels, hidden: Tensor, rows: Sequence[DraftRow], *, drawn: bool) -> Lattice:
        num_rows, slots, size = hidden.shape
        found = self.readout(hidden.reshape(-1, size))
        if levels.sampling is not None:
            temperatures = levels.sampling.temperatures
            found = found._replace(scores=levels.sampling.repeated(slots).process(found.scores, self.kernels))
        else:
            divisors = [[row.context.sampling.divisor] for row in rows]
            temperatures = upload(divisors, hidden.device, torch.promote_types(hidden.dtype, torch.float32))
            parts = [part for row in rows for part in _slot_rows(row, slots)]
            found = Candidates(processed_logits(found.full(), parts, self.kernels), found.vocab_size)
        if drawn:
            scores, places = found.scores.topk(self.num_candidates)
            tokens = places if found.tokens is None else found.tokens.expand(found.scores.shape).gather(1, places)
            # A drawn token is one of these: q has no others.
            rest = scores.new_full((len(scores),), float("-inf"))
        else:
            noise = levels.noise.onwards(slots)
            top_k = self.kernels.search.perturbed_top_k
            tokens, scores, total = top_k(found, noise, self.num_candidates, Stream.TARGET, 0)
            share = (scores.logsumexp(1) - total).clamp_max(0.0).exp()
            # Rounding must not make others where there are none.
            is_whole = scores[:, -1].isneginf() | (self.num_candidates == found.scores.shape[1])
            rest = (total + torch.log1p(-share)).masked_fill(is_whole, float("-inf"))
        scorer, successors = self.scorer, None
        if scorer is not None:
            own = tokens if self._scorer_rows is None else self._scorer_rows[tokens]
            successors = F.embedding(own, scorer.successors).view(num_rows, slots, self.num_candidates, -1)
        shape = num_rows, slots, self.num_candidates
        own_rest = rest.view(num_rows, slots)
        return Lattice(hidden, tokens.view(shape), scores.view(shape), own_rest, successors, temperatures)

    def _scored(self, lattice: Lattice, tokens: Tensor, states: Tensor, slot: int) -> Paths:
        """Return the scores of a slot's candidates after paths that end with `tokens`, int64 `[rows, width]`."""
        rows, width = tokens.shape
        scores = lattice.scores[:, slot, None].expand(-1, width, -1)
        scorer = self.scorer
        if scorer is None or lattice.successors is None:
            return Paths(lattice, scores, states)
        hidden = lattice.hidden[:, slot, None].expand(-1, width, -1).reshape(rows * width, -1)
        vectors, after = scorer(tokens.flatten(), hidden, states.flatten(0, 1))
        if slot < scorer.first_slot:
            return Paths(lattice, scores, after.view(rows, width, -1))
        edges = (vectors.view(rows, width, -1) @ lattice.successors[:, slot].transpose(1, 2)).to(scores.dtype)
        if lattice.temperatures is not None:
            edges = edges / lattice.temperatures[:, :, None]
        return Paths(lattice, scores + edges, after.view(rows, width, -1))

    def _children(
        self,
        state: Paths,
        levels: DraftLevels,  # noqa: ARG002
        level: int,
        rows: Sequence[DraftRow],  # noqa: ARG002
        paths: Callable[[], Tensor],  # noqa: ARG002
    ) -> TopK:
        lattice, scores = state.lattice, state.scores
        total = torch.logaddexp(lattice.rest[:, level - 1, None], scores.logsumexp(2))
        values, places = scores.topk(self.branching)
        tokens = _spread(lattice.tokens[:, level - 1], scores).gather(2, places)
        return TopK(tokens.flatten(0, 1), values.flatten(0, 1), total.flatten())

    def _log_q(
        self,
        state: Paths,
        levels: DraftLevels,  # noqa: ARG002
        level: int,
        rows: Sequence[DraftRow],  # noqa: ARG002
        paths: Callable[[], Tensor],  # noqa: ARG002
    ) -> Tensor:
        tokens = _spread(state.lattice.tokens[:, level - 1], state.scores).flatten(0, 1)
        scores = torch.log_softmax(state.scores, -1).flatten(0, 1)
        full = scores.new_full((len(scores), self.llama.vocab_size), float("-inf"))
        return full.scatter_(1, tokens, scores)

    def _expand(self, levels: DraftLevels, frontier: Frontier, state: Paths, level: int) -> Paths:  # noqa: ARG002
        size = state.states.shape[-1]
        states = state.states.gather(1, frontier.parents[:, :, None].expand(-1, -1, size))
        return self._scored(state.lattice, frontier.tokens, states, level)


def _spread(tokens: Tensor, scores: Tensor) -> Tensor:
    """Return a slot's candidates (int64 `[rows, candidates]`) for each path, of the shape of `scores`."""
    return tokens[:, None].expand(scores.shape)


def _slot_rows(row: DraftRow, slots: int) -> list[NodeRows]:
    """Return a row's slots as rows of logits. The path to a slot is not known yet: none is taken for it.

    A grammar is followed to the first slot alone; without a path it would forbid what the later ones need.
    """
    nothing = torch.empty(slots, 0, dtype=torch.int64)
    first = NodeRows(row.context, 1, lambda: nothing[:1])
    if slots == 1:
        return [first]
    return [first, NodeRows(row.context.without_grammar, slots - 1, lambda: nothing[1:])]
