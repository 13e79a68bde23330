"""Drafter with a model: a head whose keys and values lie in the paged cache under the target's block tables."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import DraftLevels, own_bits
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow, Proposal
from specdec.draft_heads.drafting.tree_draw import DrawSizes, TreeDraw
from specdec.draft_heads.drafting.tree_search import Frontier, TreeSearch
from specdec.draft_heads.heads.draft_head import DraftHead
from specdec.draft_heads.heads.readout import MatrixReadout, Readout
from specdec.draft_heads.llama.llama_layer import PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.kernels.draft_trees import DraftTrees, HostTrees
from specdec.kernels.fused import DraftingCache, DraftingRow, FusedDrafting
from specdec.kernels.integers import ceil_div
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.ragged_rows import RaggedRows
from specdec.kernels.types import Candidates, NoiseKey, Stream
from specdec.kernels.upload import upload
from specdec.verify.noise import noise_key
from specdec.verify.sampling import Context, Sampling
from specdec.verify.transforms import NodeRows, processed_logits
from specdec.verify.tree_batch import pad_block_tables, slots_of
from specdec.verify.verifier import noise_keys

if TYPE_CHECKING:
    # Importing it imports Triton, which an engine on plain torch does not need.
    from specdec.draft_heads.drafting.draft_graphs import DraftGraphs


class ModelDrafter:
    """EAGLE-2 drafting for a batch of rows.

    An EAGLE head's row of token i takes embedding(x_i) and the target's feature f_{i-1}, is stored at entry i of
    the request's cache, and predicts x_{i+1}. Entry 0 stays empty. A small Llama's takes x_i alone, from entry 0 on.
    Rows written while drafting lie behind the known tokens and are scratch: the entries of accepted tokens are
    rewritten from true features.

    A row that drafts nothing costs nothing: when the head drafts, it first reads the features that the target's
    passes have left in the cache meanwhile. Requests that share a block may both write the head's entries in it;
    they write the same values.

    Args:
        head: the draft head.
        readout: maps the head's states to scores of next tokens.
        kv: `[layers, slots, 2 * kv_heads, head_dim]`, the head's cache.
        features: `[slots, feature_size]`, the target's features of each cached token; None for a head that reads
            none.
        block_size: slots of a block.
        dtype: of the head's arithmetic, whatever the cache's.
        shape: bounds of a tree.
        proposal: how tokens are chosen at temperature > 0.
        kernels: the verifier's own, so that coupled drafts at temperature > 0 follow the same draw.

    Attributes:
        graphs: CUDA graphs of the loops over levels, or None.
        one_call: the drafter in one call; None where the kernel set or the head does not have it.
    """

    def __init__(
        self,
        head: DraftHead,
        readout: Readout,
        kv: Tensor,
        features: Tensor | None,
        block_size: int,
        dtype: torch.dtype,
        shape: DraftShape,
        proposal: Proposal,
        kernels: KernelSet,
    ) -> None:
        self.kernels = kernels
        llama = head.llama
        self.head, self.readout, self.shape = head, readout, shape
        self.kv, self.block_size, self.dtype = kv, block_size, dtype
        self.features = kv.new_empty(kv.shape[1], 0, dtype=dtype) if features is None else features
        self.rope = llama.rope.table(llama.head_dim, llama.max_position, dtype).to(kv.device)
        self.proposal = proposal
        self.branching = min(shape.branching, readout.size)
        self.draw_sizes = DrawSizes.of(self.branching, shape)
        self.graphs: DraftGraphs | None = None
        self.one_call = self._one_call()
        self._own_bits = own_bits(shape.depth - 1, self.branching, kv.device)

    def _one_call(self) -> FusedDrafting | None:
        weights = self.head.drafting_weights() if self.kernels.fused_drafting is not None else None
        if weights is None or not isinstance(self.readout, MatrixReadout):
            return None
        assert self.kernels.fused_drafting is not None
        output, size, tokens = self.readout.projection, self.readout.vocab_size, self.readout.tokens
        cache = DraftingCache(self.kv, self.features, self.rope, self.block_size, self.head.first_entry, self.branching)
        return self.kernels.fused_drafting(weights, output, size, tokens, cache)

    def propose(self, rows: Sequence[DraftRow]) -> DraftTrees:
        """Draft one tree per row; none after a single token where a head needs the feature before it."""
        first = self.head.first_entry
        reading = [i for i, row in enumerate(rows) if row.draft_prefill_end > max(row.num_draft_cached, first)]
        if self.one_call is not None and reading:
            given = self._drafting_rows([rows[i] for i in reading])
            if given is not None and self.one_call.takes(given):
                return self._draft_in_one_call(self.one_call, given, rows, reading)
        hidden = self._read_features([rows[i] for i in reading]) if reading else None
        # Their places among the reading ones.
        drafting = [k for k, i in enumerate(reading) if rows[i].num_nodes > 0 and rows[i].max_depth > 0]
        if hidden is None or not drafting:
            return HostTrees.empty(len(rows))
        drawn = [
            k for k in drafting if self.proposal == Proposal.DRAWN and not rows[reading[k]].context.sampling.is_greedy
        ]
        # All of one form, `HostTrees` or `DeviceTrees`.
        found: Any = None
        order: list[int] = []
        for chosen, draft in ((drawn, self._draw), ([k for k in drafting if k not in drawn], self._search)):
            if chosen:
                roots = hidden if len(chosen) == len(hidden) else hidden.index_select(0, upload(chosen, hidden.device))
                places = [reading[k] for k in chosen]
                new = draft([rows[i] for i in places], roots)
                found = new if found is None else found.concat(new)
                order += places
        if order != list(range(len(rows))):
            place = {row: k for k, row in enumerate(order)}
            found = found.select([place.get(row) for row in range(len(rows))])
        trees: DraftTrees = found
        return trees

    def _search(self, rows: Sequence[DraftRow], hidden: Tensor) -> DraftTrees:
        """Draft trees of the most probable tokens, with the position's noise or without."""
        depths = [min(self.shape.depth, row.max_depth) for row in rows]
        stops_early = self.shape.min_reach > 0 and not all(row.full_depth for row in rows)
        graphs = None if stops_early or _needs_edits(rows) else self.graphs
        levels = self._levels(rows, depths, self.branching, noise_keys, graphs)
        if graphs is not None:
            return self._trees(graphs.search(levels, hidden), rows, depths)
        return self._trees(self.search(levels, hidden, rows, depths if stops_early else None), rows, depths)

    def _drafting_rows(self, rows: Sequence[DraftRow]) -> list[DraftingRow] | None:
        """Return rows for a drafter in one call, None where a row needs logit edits or drawn tokens."""
        first, given = self.head.first_entry, list[DraftingRow]()
        for row in rows:
            sampling, drafts = row.context.sampling, row.num_nodes > 0
            is_drawn = self.proposal == Proposal.DRAWN and not sampling.is_greedy
            if drafts and (sampling.edits or is_drawn):
                return None
            start, end = max(row.num_draft_cached, first), row.draft_prefill_end
            depth = min(self.shape.depth, row.max_depth) if drafts else 0
            noise = None if sampling.is_greedy or not depth else noise_key(row.context)
            temperature = 1.0 if sampling.is_greedy else sampling.temperature
            tokens = row.token_ids[start:end]
            limits = sampling.limits if sampling.filters else None
            given.append(
                DraftingRow(row.block_table, tokens, start, end, row.num_nodes, depth, temperature, limits, noise)
            )
        return given

    def _draft_in_one_call(
        self, one_call: FusedDrafting, given: list[DraftingRow], rows: Sequence[DraftRow], reading: list[int]
    ) -> DraftTrees:
        goes_on = all(rows[i].full_depth for i in reading if rows[i].num_nodes)
        found = one_call(given, 0.0 if goes_on else self.shape.min_reach)
        if len(reading) == len(rows):
            return found
        place = {row: k for k, row in enumerate(reading)}
        return found.select([place.get(row) for row in range(len(rows))])

    def _draw(self, rows: Sequence[DraftRow], hidden: Tensor) -> DraftTrees:
        """Draft trees of tokens drawn from q; how many is fixed beforehand, or q would not be their distribution."""
        depths = [min(self.shape.depth, row.max_depth) for row in rows]
        graphs = None if _needs_edits(rows) else self.graphs
        if graphs is not None and len(rows) > graphs.most_drawn_rows:
            graphs = None
        levels = self._levels(rows, depths, self.draw_sizes.width, _step_keys, graphs)
        draw = self.draw(levels, hidden, rows) if graphs is None else graphs.draw(levels, hidden)
        return self._trees(draw, rows, depths)

    @property
    def num_draft_probs(self) -> int:
        """Number of distributions that the children of a drawn tree come from."""
        return 1 + (self.shape.depth - 1) * self.draw_sizes.width

    def _trees(self, candidates: TreeSearch | TreeDraw, rows: Sequence[DraftRow], depths: Sequence[int]) -> DraftTrees:
        """Return the trees of all rows but padding, on the device where the host need not know them yet."""
        padding = candidates.num_rows - len(rows)
        bounds = [*(row.num_nodes for row in rows), *[0] * padding], [*depths, *[1] * padding]
        trees = candidates.device_trees(*bounds) if self.kernels.on_device else candidates.host_trees(*bounds)
        return trees.select(range(len(rows))) if padding else trees

    def _padding_row(self) -> DraftRow:
        """Return a row whose nodes lie in the null block."""
        block = self.kv.shape[1] // self.block_size - 1
        table = [block] * ceil_div(2 + self.shape.slots, self.block_size)
        return DraftRow(table, 1, 2, 0, 0, Context(Sampling(), [0, 0], 1))

    def search(
        self, levels: DraftLevels, hidden: Tensor, rows: Sequence[DraftRow] = (), depths: list[int] | None = None
    ) -> TreeSearch:
        """Run the loop over levels; without logit edits and with `min_reach` 0 the host does not wait for the device.

        Args:
            levels: inputs of all levels.
            hidden: `[rows, hidden_size]`, the head's state after each root.
            rows: not needed in that case.
            depths: levels of each row, lowered where a deeper level is less probable than `min_reach`; None to draft
                all levels.
        """
        levels.restart()
        search = TreeSearch(levels.num_rows, self.branching)
        for level in range(1, levels.depth + 1):
            scores = self._scores(hidden, levels, level, rows, search.frontier_paths)
            noise = levels.noise_at(level - 1).later(level - 1)
            best = self.kernels.perturbed_top_k(scores, noise, self.branching, Stream.TARGET, 0)
            frontier = search.expand(best.tokens, best.log_chances)
            if depths and level < levels.depth:
                for i, reach in enumerate(frontier.values.exp().sum(1).tolist()):
                    if reach < self.shape.min_reach:
                        depths[i] = min(depths[i], level)
            if level >= max(depths or [levels.depth]):
                break
            hidden = self._expand(levels, frontier, hidden, level)
        return search

    def draw(self, levels: DraftLevels, hidden: Tensor, rows: Sequence[DraftRow] = ()) -> TreeDraw:
        """Run the loop over levels of drawn trees."""
        levels.restart()
        draw = TreeDraw(levels.num_rows, self.draw_sizes)
        for level in range(1, levels.depth + 1):
            scores = self._scores(hidden, levels, level, rows, draw.frontier_paths)
            log_q = torch.log_softmax(scores.full(), -1)
            candidates = Candidates(log_q.clone(), scores.vocab_size)
            count = min(draw.count, log_q.shape[1])
            noise = levels.noise_at(level - 1)
            children = self.kernels.perturbed_top_k(candidates, noise, count, Stream.DRAFT, level)
            by_row = (part.view(levels.num_rows, -1, part.shape[1]) for part in (log_q, children.tokens))
            frontier = draw.expand(*by_row)
            if level < levels.depth:
                hidden = self._expand(levels, frontier, hidden, level)
        return draw

    def _read_features(self, rows: Sequence[DraftRow]) -> Tensor:
        """Run the head over the tokens to be read; return its state after each row's last."""
        tokens, slots, sources, positions, counts = (list[int]() for _ in range(5))
        first = self.head.first_entry
        for row in rows:
            start, end = max(row.num_draft_cached, first), row.draft_prefill_end
            entries = slots_of(row.block_table, start - first, end, self.block_size)
            tokens += row.token_ids[start:end]
            sources += entries[: end - start]
            slots += entries[first:]
            positions += range(start - first, end - first)
            counts.append(end - start)
        device = self.kv.device
        places = upload(positions, device)
        lengths = [row.draft_prefill_end for row in rows]
        ragged = RaggedRows(
            query_lens=counts,
            lengths=lengths,
            tree_starts=lengths,
            block_tables=pad_block_tables([row.block_table for row in rows], device),
            visible=places + (first + 1),
            ancestors=places.new_zeros(len(positions), 1),
            block_size=self.block_size,
            first=first,
        )
        features = self.features.index_select(0, upload(sources, device))
        hidden = self._forward(upload(tokens, device), features, places, upload(slots, device), ragged)
        if len(rows) == hidden.shape[0]:
            return hidden
        return hidden.index_select(0, upload(counts, device).cumsum(0) - 1)

    def _levels(
        self,
        rows: Sequence[DraftRow],
        depths: Sequence[int],
        width: int,
        keys_of: Callable[[Sequence[Context]], list[NoiseKey | None]],
        graphs: "DraftGraphs | None",
    ) -> DraftLevels:
        """Return the inputs of the loop over levels: of all levels and with padding rows where a graph runs it.

        Args:
            keys_of: returns the noise keys of the output positions that the roots' children would take.
        """
        depth, device = max(depths), self.kv.device
        if graphs is not None:
            depth = self.shape.depth
            rows = [*rows, *[self._padding_row()] * graphs.padding(len(rows))]
        bits = self._own_bits[: depth - 1] if width == self.branching else own_bits(depth - 1, width, device)
        dtype = torch.promote_types(self.dtype, torch.float32)
        keys = keys_of([row.context for row in rows])
        return DraftLevels.start(rows, self.block_size, bits, keys, self.head.first_entry, device, dtype)

    def _expand(self, levels: DraftLevels, frontier: Frontier, hidden: Tensor, level: int) -> Tensor:
        """Run the head over the frontier; return its state after each frontier node, `[rows * width, hidden]`."""
        num_rows = len(frontier.tokens)
        before = hidden.view(num_rows, -1, hidden.shape[-1])
        size = before.shape[-1]
        features = before.gather(1, frontier.parents[:, :, None].expand(-1, -1, size)).view(-1, size)
        ragged = levels.ragged(frontier, level)
        positions = levels.positions + (level - 1)
        tokens = frontier.tokens.flatten()
        return self._forward(tokens, features, positions, levels.slots[level - 1], ragged)

    def _forward(self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor, rows: RaggedRows) -> Tensor:
        attentions = [PagedAttention(kv, slots, rows, self.kernels) for kv in self.kv]
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


def _step_keys(contexts: Sequence[Context]) -> list[NoiseKey | None]:
    """Return noise keyed by the current step.

    Block verification conditions on tokens drawn past the cut, so reusing their noise in the next step would bias the
    output.
    """
    return [noise_key(context) for context in contexts]


def _needs_edits(rows: Sequence[DraftRow]) -> bool:
    """Return whether any row needs logit edits beyond temperature and filtering."""
    return any(row.context.sampling.edits for row in rows)


def _paths_of(paths: Callable[[], Tensor], row: int) -> Tensor:
    return paths()[row]
