"""The base of drafters with a model: from a batch of rows to their trees, searched or drawn, level by level."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import DraftLevels
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftAhead, DraftRow, Proposal
from specdec.draft_heads.drafting.drafts_ahead import DraftsAhead, LoopAhead, NewTokens, new_tokens
from specdec.draft_heads.drafting.one_call_rows import one_call_rows
from specdec.draft_heads.drafting.tree_draw import DrawSizes, TreeDraw
from specdec.draft_heads.drafting.tree_search import Searched, TreeBounds, TreeSearch
from specdec.draft_heads.heads.draft_head import CachedHead
from specdec.draft_heads.heads.readout import Readout
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.adapters import AdapterBank
from specdec.kernels.types.draft_trees import DraftTrees, HostTrees
from specdec.kernels.types.fused import DraftingRow, FusedDrafting
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.tree import TreeRow
from specdec.kernels.types.tree_search import Frontier
from specdec.kernels.types.types import Candidates, NoiseKey, Stream, TopK, Walk
from specdec.kernels.types.upload import Packet
from specdec.verify.noise import noise_key
from specdec.verify.sampling import Context, Sampling
from specdec.verify.tree_batch import PackedBatch, TreeBatch
from specdec.verify.verifier import noise_keys

if TYPE_CHECKING:
    # Importing it imports Triton, which an engine on plain torch does not need.
    from specdec.draft_heads.drafting.draft_graphs import DraftGraphs, LoopGraphs
    from specdec.kernels.triton.plan_buffer import Capture
    from specdec.verify.pass_graphs import Pass

# What the loop over levels carries from one level to the next.
State = TypeVar("State")
# What a loop over levels returns.
Grown = TypeVar("Grown")


class TreeDrafter(ABC, Generic[State]):
    """EAGLE-2's trees for a batch of rows; a subclass scores the children of a frontier.

    Entry i of a head's cache depends on the tokens up to i and the target's features of those before i. Rows written
    while drafting lie behind the known tokens and are scratch: entries of accepted tokens are written again, from true
    features.

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
        adapters: the bank of adapters of the head's layers; None where rows have none.

    Attributes:
        windows: entries that the head's rows see in each layer, 0 for all.
        graphs: CUDA graphs of the loops over levels, or None.
        one_call: the drafter in one call; None where the kernel set or the head does not have it.
    """

    def __init__(
        self,
        head: CachedHead,
        readout: Readout,
        kv: Tensor,
        features: Tensor | None,
        block_size: int,
        dtype: torch.dtype,
        shape: DraftShape,
        proposal: Proposal,
        kernels: KernelSet,
        adapters: AdapterBank | None = None,
    ) -> None:
        self.kernels, self.readout, self.shape, self.adapters = kernels, readout, shape, adapters
        self.llama = llama = head.llama
        self.windows = head.windows
        self.first, self.kv, self.block_size, self.dtype = head.first_entry, kv, block_size, dtype
        self.features = kv.new_empty(kv.shape[1], 0, dtype=dtype) if features is None else features
        self.rope = llama.rope.table(llama.head_dim, llama.max_position, dtype).to(kv.device)
        self.slopes = llama.slopes(dtype, kv.device)
        self.proposal = proposal
        self.branching = min(shape.branching, readout.size)
        self.draw_sizes = DrawSizes.of(self.branching, shape)
        self.graphs: DraftGraphs | None = None
        # What was drafted behind the step before.
        self._ahead: DraftsAhead | None = None
        self.one_call = self._one_call(head)

    def _one_call(self, head: CachedHead) -> FusedDrafting | None:  # noqa: ARG002
        """Return the drafter in one call, if there is one."""
        return None

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Numbers of a token's state, as `read` returns it."""

    @abstractmethod
    def read(self, batch: TreeBatch) -> Tensor:
        """Write the head's entries of known tokens; return their states `[tokens, state_size]`."""

    @abstractmethod
    def _reading(self, rows: Sequence[DraftRow], packet: Packet) -> Callable[[], Tensor]:
        """Return what writes the head's entries of the tokens to be read, once the packet is sent.

        It returns what drafting begins with, `[rows, size]`.
        """

    @abstractmethod
    def _levels(
        self,
        rows: Sequence[DraftRow],
        depth: int,
        width: int,
        keys: Sequence[NoiseKey | None],
        packet: Packet,
        *,
        for_graph: bool,
        ahead: int,
    ) -> DraftLevels:
        """Return the inputs of the loop over levels, which are there once the packet is sent.

        Args:
            keys: noise of the output positions that the roots' children would take.
            ahead: see `DraftLevels.start`.
        """

    @abstractmethod
    def _roots(self, states: Tensor, new: NewTokens) -> Tensor:
        """Return what drafting begins with, of states `[rows, most, state_size]` of the tokens that a step brings."""

    @abstractmethod
    def _begin(self, levels: DraftLevels, roots: Tensor, rows: Sequence[DraftRow], *, drawn: bool) -> State:
        """Return the state of the roots.

        Args:
            roots: of `_reading`.
            rows: empty where none needs logit edits.
        """

    @abstractmethod
    def _children(
        self, state: State, levels: DraftLevels, level: int, rows: Sequence[DraftRow], paths: Callable[[], Tensor]
    ) -> TopK:
        """Return the best children of each frontier node, `[rows * width, branching]`, with noise or without.

        Args:
            paths: returns the tokens down to each node, int64 `[rows, width, level - 1]`.
        """

    @abstractmethod
    def _log_q(
        self, state: State, levels: DraftLevels, level: int, rows: Sequence[DraftRow], paths: Callable[[], Tensor]
    ) -> Tensor:
        """Return the logarithm of the distribution after each frontier node, `[rows * width, vocab_size]`."""

    @abstractmethod
    def _expand(self, levels: DraftLevels, frontier: Frontier, state: State, level: int) -> State:
        """Return the state of the frontier that follows `level`."""

    @property
    def _stops_early(self) -> bool:
        """Return whether drafting ends at a level that is too rarely reached, `DraftShape.min_reach`."""
        return self.shape.min_reach > 0

    def propose(self, rows: Sequence[DraftRow]) -> DraftTrees:
        """Draft one tree per row; none after a single token where a head needs the feature before it."""
        ahead, self._ahead = self._ahead, None
        places = {} if ahead is None else ahead.places_of(rows)
        drawn, _ = self._split([i for i, row in enumerate(rows) if row.drafts], rows)
        if any(i not in places for i in drawn):
            # Theirs would overwrite the probabilities that the others were drawn from.
            places = {i: place for i, place in places.items() if i not in drawn}
        reading = [
            i
            for i, row in enumerate(rows)
            if i not in places and row.draft_prefill_end > max(row.num_draft_cached, self.first)
        ]
        if self.one_call is not None and reading:
            given = one_call_rows([rows[i] for i in reading], self.shape.depth, self.first, self.proposal)
            if given is not None and self.one_call.takes(given):
                return self._draft_in_one_call(self.one_call, given, rows, reading)
        packet = Packet(self.kv.device)
        # The trees of all rows, group by group, with the row of each; of one form, `HostTrees` or `DeviceTrees`.
        found, order = list[Any](), list[int | None]()
        if ahead is not None and places:
            row_of = {place: i for i, place in places.items()}
            for loop in ahead.loops:
                own = [row_of.get(place) for place in loop.places]
                if any(row is not None for row in own):
                    order += own
                    found.append(self._choosing(loop, [None if i is None else rows[i] for i in own], packet))
        read = self._reading([rows[i] for i in reading], packet) if reading else None
        packet.send()
        # Before other graphs run, whose memory the candidates share.
        found = [choose() for choose in found]
        if read is not None:
            # A device reads while the host prepares the levels.
            found += self._drafted(read(), rows, reading, order, packet)
        if not found:
            return HostTrees.empty(len(rows))
        trees = found[0]
        for other in found[1:]:
            trees = trees.concat(other)
        if order != list(range(len(rows))):
            place_of = {row: k for k, row in enumerate(order) if row is not None}
            trees = trees.select([place_of.get(row) for row in range(len(rows))])
        drafted: DraftTrees = trees
        return drafted

    def _drafted(
        self,
        roots: Tensor,
        rows: Sequence[DraftRow],
        reading: Sequence[int],
        order: list[int | None],
        packet: Packet,
    ) -> list[DraftTrees]:
        """Draft the trees of rows that have been read, in groups; add the row of each tree to `order`.

        Args:
            roots: of `_reading`.
        """
        # Their places among the reading ones.
        drafting = [k for k, i in enumerate(reading) if rows[i].num_nodes > 0 and rows[i].max_depth > 0]
        groups = [
            (
                [reading[k] for k in chosen],
                None if len(chosen) == len(reading) else packet.add(chosen),
                prepare([rows[reading[k]] for k in chosen], packet),
            )
            for chosen, prepare in zip(
                self._split(drafting, [rows[i] for i in reading]), (self._draw, self._search), strict=True
            )
            if chosen
        ]
        packet.send()
        for places, _, _ in groups:
            order += places
        return [draft(roots if chosen is None else roots.index_select(0, chosen)) for _, chosen, draft in groups]

    def _split(self, places: Sequence[int], rows: Sequence[DraftRow]) -> tuple[list[int], list[int]]:
        """Return the places of rows whose trees are drawn, and of those whose trees are searched."""
        drawn = [k for k in places if self.proposal == Proposal.DRAWN and not rows[k].context.sampling.is_greedy]
        return drawn, [k for k in places if k not in drawn]

    def prepare_ahead(
        self, rows: Sequence[DraftRow], trees: DraftTrees, places: Sequence[int], packet: Packet
    ) -> tuple[list[int], DraftAhead] | None:
        """Prepare to draft the trees of the step after this one for some of its rows, behind its walk.

        All that depends on the number of accepted drafts is done on the device. The head reads as many tokens as a step
        may bring; what it writes behind those that it does bring is scratch.

        Args:
            rows: rows of the step, with trees.
            trees: that are walked.
            places: places of the rows among the trees.
            packet: takes what the drafting needs.

        Returns:
            Which of the rows are drafted for, and what drafts for them once the packet is sent and the walk is made,
            for the next call of `propose`; None if there are none.
        """
        graphs, shape = self.graphs, self.shape
        if graphs is None or self._stops_early or trees.depth > shape.depth:
            return None
        last = self.llama.max_position - shape.tokens - shape.positions
        able = [k for k, row in enumerate(rows) if row.is_followed and row.drafts and len(row.token_ids) <= last]
        drawn_rows, searched_rows = self._split(able, rows)
        # Graphs of drawing are captured last, so they leave the candidates of a search as they are.
        kinds: tuple[tuple[list[int], LoopGraphs[Any], bool], ...] = (
            (searched_rows, graphs.search, False),
            (drawn_rows, graphs.draw, True),
        )
        groups = [kind for kind in kinds if kind[0] and _graphs_for([rows[k] for k in kind[0]], kind[1])]
        kept = [k for own, _, _ in groups for k in own]
        if not kept:
            return None
        chosen = [rows[k] for k in kept]
        read = self._reading_ahead(chosen, packet)
        tokens_of = new_tokens(trees, [places[k] for k in kept], shape.tokens, packet)
        loops, start = list[tuple[slice, bool, DraftLevels, Callable[[Tensor], Any]]](), 0
        for own, loop, drawn in groups:
            width, keys_of = (self.draw_sizes.width, _step_keys) if drawn else (self.branching, noise_keys)
            levels = self._padded_levels([rows[k] for k in own], (), width, keys_of, loop, packet, shape.tokens)
            loops.append((slice(start, start + len(own)), drawn, levels, loop.loop_of(levels, packet)))
            start += len(own)

        def draft(walk: Walk) -> DraftsAhead:
            new = tokens_of(walk)
            roots, grown = self._roots(read(new), new), list[LoopAhead]()
            for part, drawn, levels, run in loops:
                levels.advance(new.accepted[part])
                grown.append(LoopAhead(range(part.start, part.stop), drawn, run(roots[part])))
            self._ahead = DraftsAhead(chosen, grown)
            return self._ahead

        return kept, draft

    def _choosing(self, loop: LoopAhead, rows: Sequence[DraftRow | None], packet: Packet) -> Callable[[], DraftTrees]:
        """Return what chooses the nodes of trees that were drafted ahead, once the packet is sent.

        Args:
            rows: of the loop's places, those that take their trees.
        """
        budgets = [0 if row is None else row.num_nodes for row in rows]
        depths = [1 if row is None else min(self.shape.depth, row.max_depth) for row in rows]
        if loop.drawn:
            draw: TreeDraw = loop.grown
            padding = draw.num_rows - len(rows)
            return lambda: draw.device_trees([*budgets, *[0] * padding], [*depths, *[1] * padding])
        bounds = TreeBounds.of(budgets, depths, self.shape.depth, self.branching, packet, self.shape.nodes)
        searched: Searched = loop.grown
        return lambda: searched.trees(bounds, self.kernels.search)

    def _draft_in_one_call(
        self, one_call: FusedDrafting, given: list[DraftingRow], rows: Sequence[DraftRow], reading: list[int]
    ) -> DraftTrees:
        goes_on = all(rows[i].full_depth for i in reading if rows[i].num_nodes)
        found = one_call(given, 0.0 if goes_on else self.shape.min_reach)
        if len(reading) == len(rows):
            return found
        place = {row: k for k, row in enumerate(reading)}
        return found.select([place.get(row) for row in range(len(rows))])

    def _search(self, rows: Sequence[DraftRow], packet: Packet) -> Callable[[Tensor], DraftTrees]:
        """Return what drafts trees of the most probable tokens, with the position's noise or without, of roots."""
        depths = [min(self.shape.depth, row.max_depth) for row in rows]
        stops_early = self._stops_early and not all(row.full_depth for row in rows)
        graphs = None if stops_early or self.graphs is None else _graphs_for(rows, self.graphs.search)
        levels = self._padded_levels(rows, depths, self.branching, noise_keys, graphs, packet)
        if not self.kernels.on_device or stops_early:
            given = depths if stops_early else None
            return lambda roots: self._searched(self.search(levels, roots, rows, given), rows, depths)
        run = partial(self.candidates, levels, rows=rows) if graphs is None else graphs.loop_of(levels, packet)
        bounds = self._bounds(rows, depths, levels.depth, packet)
        return lambda roots: run(roots).trees(bounds, self.kernels.search)

    def _bounds(self, rows: Sequence[DraftRow], depths: Sequence[int], depth: int, packet: Packet) -> TreeBounds:
        """Return the bounds of rows' trees by a search of `depth` levels."""
        budgets = [row.num_nodes for row in rows]
        return TreeBounds.of(budgets, depths, depth, self.branching, packet, self.shape.nodes)

    def candidates(self, levels: DraftLevels, roots: Tensor, rows: Sequence[DraftRow] = ()) -> Searched:
        """Run the loop over levels, and return the candidates as they stay on the device; see `search`."""
        return self.search(levels, roots, rows).candidates()

    def _searched(self, search: TreeSearch, rows: Sequence[DraftRow], depths: Sequence[int]) -> DraftTrees:
        """Return the trees of a search on the host, or of one whose levels the host did not know beforehand."""
        if not self.kernels.on_device:
            return search.host_trees([row.num_nodes for row in rows], depths)
        packet = Packet(self.kv.device)
        bounds = self._bounds(rows, depths, search.num_levels, packet)
        packet.send()
        return search.candidates().trees(bounds, self.kernels.search)

    def _draw(self, rows: Sequence[DraftRow], packet: Packet) -> Callable[[Tensor], DraftTrees]:
        """Return what drafts trees of tokens drawn from q, of roots.

        How many are drawn is fixed beforehand, or q would not be their distribution.
        """
        depths = [min(self.shape.depth, row.max_depth) for row in rows]
        graphs = None if self.graphs is None else _graphs_for(rows, self.graphs.draw)
        levels = self._padded_levels(rows, depths, self.draw_sizes.width, _step_keys, graphs, packet)
        run = partial(self.draw, levels, rows=rows) if graphs is None else graphs.loop_of(levels, packet)
        return lambda roots: self._drawn(run(roots), rows, depths)

    def _drawn(self, draw: TreeDraw, rows: Sequence[DraftRow], depths: Sequence[int]) -> DraftTrees:
        """Return the trees of all rows but padding, on the device where the host need not know them yet."""
        bounds = _padded_bounds(rows, depths, draw.num_rows)
        trees = draw.device_trees(*bounds) if self.kernels.on_device else draw.host_trees(*bounds)
        return _without_padding(trees, len(rows))

    def capture(self, capture: "Capture", rows: Sequence[DraftRow], *, drawn: bool) -> None:
        """Capture the loop over levels for as many rows as these, which belong to no request.

        Args:
            capture: `CudaGraphs.capture` on a GPU.
            rows: a power of two of them.
            drawn: whether the trees are drawn.
        """
        assert self.graphs is not None
        graphs: LoopGraphs[Any] = self.graphs.draw if drawn else self.graphs.search
        width, keys_of = (self.draw_sizes.width, _step_keys) if drawn else (self.branching, noise_keys)
        packet = Packet(self.kv.device)
        read = self._reading(rows, packet)
        levels = self._padded_levels(rows, (), width, keys_of, graphs, packet)
        graphs.capture(capture, levels, packet, read)

    def _padded_levels(
        self,
        rows: Sequence[DraftRow],
        depths: Sequence[int],
        width: int,
        keys_of: Callable[[Sequence[Context]], list[NoiseKey | None]],
        graphs: "LoopGraphs[Any] | None",
        packet: Packet,
        ahead: int = 0,
    ) -> DraftLevels:
        """Return the inputs of the loop over levels: of all levels and with padding rows where a graph runs it."""
        if graphs is None:
            depth = max(depths)
        else:
            depth = self.shape.depth
            rows = [*rows, *[self._padding_row()] * graphs.padding(len(rows))]
        keys = keys_of([row.context for row in rows])
        return self._levels(rows, depth, width, keys, packet, for_graph=graphs is not None, ahead=ahead)

    def _padding_row(self) -> DraftRow:
        """Return a row whose nodes lie in the null block."""
        block = self.kv.shape[1] // self.block_size - 1
        table = [block] * ceil_div(2 + self.shape.slots_ahead, self.block_size)
        return DraftRow(table, 1, 2, 0, 0, Context(Sampling(), [0, 0], 1))

    def search(
        self, levels: DraftLevels, roots: Tensor, rows: Sequence[DraftRow] = (), depths: list[int] | None = None
    ) -> TreeSearch:
        """Run the loop over levels; without logit edits and with `min_reach` 0 the host does not wait for the device.

        Args:
            levels: inputs of all levels.
            roots: `[rows, size]` of `_reading`.
            rows: not needed in that case.
            depths: levels of each row, lowered where a deeper level is less probable than `min_reach`; None to draft
                all levels.
        """
        levels.restart()
        search = TreeSearch(levels.num_rows, self.branching, self.kernels.search)
        state = self._begin(levels, roots, rows, drawn=False)
        for level in range(1, levels.depth + 1):
            children = self._children(state, levels, level, rows, search.frontier_paths)
            frontier = search.expand(children, levels.own_bits_at(level))
            if depths and level < levels.depth:
                for i, reach in enumerate(frontier.values.exp().sum(1).tolist()):
                    if reach < self.shape.min_reach:
                        depths[i] = min(depths[i], level)
            if level >= max(depths or [levels.depth]):
                break
            state = self._expand(levels, frontier, state, level)
        return search

    def draw(
        self, levels: DraftLevels, roots: Tensor, rows: Sequence[DraftRow] = (), probs: Tensor | None = None
    ) -> TreeDraw:
        """Run the loop over levels of drawn trees.

        Args:
            probs: memory for the draft probabilities of as many rows or more, see `TreeDraw`; None to allocate it.
        """
        levels.restart()
        own = None if probs is None else probs[: levels.num_rows]
        draw = TreeDraw(levels.num_rows, self.draw_sizes, levels.depth, own)
        state = self._begin(levels, roots, rows, drawn=True)
        for level in range(1, levels.depth + 1):
            log_q = self._log_q(state, levels, level, rows, draw.frontier_paths)
            candidates = Candidates(log_q.clone(), log_q.shape[1])
            count = min(draw.count, log_q.shape[1])
            noise = levels.noise_at(level - 1)
            children = self.kernels.search.perturbed_top_k(candidates, noise, count, Stream.DRAFT, level)
            by_row = (part.view(levels.num_rows, -1, part.shape[1]) for part in (log_q, children.tokens))
            frontier = draw.expand(*by_row)
            if level < levels.depth:
                state = self._expand(levels, frontier, state, level)
        return draw

    def _unread(self, rows: Sequence[DraftRow], packet: Packet) -> Callable[[], tuple[TreeBatch, Tensor]]:
        """Return what reads, once the packet is sent: it writes the entries, and returns them with their states."""
        starts = [max(row.num_draft_cached, self.first) for row in rows]
        parts = [
            TreeRow(row.token_ids[start : row.draft_prefill_end], start, row.block_table, 1, row.adapter)
            for row, start in zip(rows, starts, strict=True)
        ]
        packed, run = self._packed(rows, parts, packet)
        return lambda: (packed.batch, run(packed.complete()))

    def _reading_ahead(self, rows: Sequence[DraftRow], packet: Packet) -> Callable[[NewTokens], Tensor]:
        """Return what reads the tokens that a step brings, once the packet is sent and the device knows them.

        It returns the states of as many tokens as there may be, `[rows, most, state_size]`.
        """
        most, count = self.shape.tokens, len(rows)
        parts = [TreeRow([0] * most, len(row.token_ids), row.block_table, 1, row.adapter) for row in rows]
        packed, run = self._packed(rows, parts, packet)

        def read(new: NewTokens) -> Tensor:
            batch = packed.complete()
            batch.tokens[: count * most].view(count, most).copy_(new.tokens)
            if batch.sources is not None:
                # Nothing may have been written where there is no token.
                sources = batch.sources[: count * most].view(count, most)
                place = torch.arange(most, device=sources.device)
                sources.copy_(torch.where(place <= new.accepted[:, None], sources, sources[:, :1]))
            return run(batch)[: count * most].view(count, most, -1)

        return read

    def _packed(self, rows: Sequence[DraftRow], parts: list[TreeRow], packet: Packet) -> "tuple[PackedBatch, Pass]":
        """Return packed tokens to be read, and the pass over them."""
        firsts, none = [max(row.draft_start, self.first) for row in rows], HostTrees.empty(len(rows))
        if self.graphs is None:
            args = packet, parts, none, self.block_size
            return TreeBatch.pack_into(*args, first=self.first, firsts=firsts), self.read
        packed = self.graphs.reading.pack(packet, parts, none, firsts)
        return packed, self.graphs.reading.pass_of(packed, packet)

    def _adapt(self, rows: RaggedRows) -> None:
        """Have the head's next products adapt these rows."""
        if self.adapters is not None:
            self.adapters.use(rows)


def _padded_bounds(rows: Sequence[DraftRow], depths: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Return most nodes and levels of `count` rows, of which the last are padding."""
    padding = count - len(rows)
    return [*(row.num_nodes for row in rows), *[0] * padding], [*depths, *[1] * padding]


def _without_padding(trees: DraftTrees, count: int) -> DraftTrees:
    return trees.select(range(count)) if len(trees.sizes) > count else trees


def _step_keys(contexts: Sequence[Context]) -> list[NoiseKey | None]:
    """Return noise keyed by the current step, so that no step uses that of another; see `PhiloxChance`."""
    return [noise_key(context) for context in contexts]


def _graphs_for(rows: Sequence[DraftRow], graphs: "LoopGraphs[Grown]") -> "LoopGraphs[Grown] | None":
    """Return the graphs if they can draft for these rows: no row needs logit edits beyond temperature and filtering."""
    takes = graphs.has(len(rows), adapted=any(row.adapter for row in rows))
    return graphs if takes and not any(row.context.sampling.edits for row in rows) else None
