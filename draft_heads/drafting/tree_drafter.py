"""The base of drafters with a model: from a batch of rows to their trees, searched or drawn, level by level."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import DraftLevels, MakeBounds
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow, Proposal
from specdec.draft_heads.drafting.one_call_rows import one_call_rows
from specdec.draft_heads.drafting.tree_draw import DrawSizes, TreeDraw
from specdec.draft_heads.drafting.tree_search import SearchedNodes, TreeBounds, TreeSearch
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
from specdec.kernels.types.types import Candidates, NoiseKey, Stream, TopK
from specdec.kernels.types.upload import Packet
from specdec.verify.noise import noise_key
from specdec.verify.sampling import Context, Sampling
from specdec.verify.tree_batch import TreeBatch
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
        bounds: MakeBounds | None,
    ) -> DraftLevels:
        """Return the inputs of the loop over levels, which are there once the packet is sent.

        Args:
            keys: noise of the output positions that the roots' children would take.
        """

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
        reading = [i for i, row in enumerate(rows) if row.draft_prefill_end > max(row.num_draft_cached, self.first)]
        if self.one_call is not None and reading:
            given = one_call_rows([rows[i] for i in reading], self.shape.depth, self.first, self.proposal)
            if given is not None and self.one_call.takes(given):
                return self._draft_in_one_call(self.one_call, given, rows, reading)
        if not reading:
            return HostTrees.empty(len(rows))
        packet = Packet(self.kv.device)
        read = self._reading([rows[i] for i in reading], packet)
        packet.send()
        # A device reads while the host prepares the levels.
        roots = read()
        # Their places among the reading ones.
        drafting = [k for k, i in enumerate(reading) if rows[i].num_nodes > 0 and rows[i].max_depth > 0]
        drawn = [
            k for k in drafting if self.proposal == Proposal.DRAWN and not rows[reading[k]].context.sampling.is_greedy
        ]
        groups = [
            (
                [reading[k] for k in chosen],
                None if len(chosen) == len(reading) else packet.add(chosen),
                prepare([rows[reading[k]] for k in chosen], packet),
            )
            for chosen, prepare in ((drawn, self._draw), ([k for k in drafting if k not in drawn], self._search))
            if chosen
        ]
        packet.send()
        # All of one form, `HostTrees` or `DeviceTrees`.
        found: Any = None
        order: list[int] = []
        for places, chosen, draft in groups:
            new = draft(roots if chosen is None else roots.index_select(0, chosen))
            found = new if found is None else found.concat(new)
            order += places
        if found is None:
            return HostTrees.empty(len(rows))
        if order != list(range(len(rows))):
            place = {row: k for k, row in enumerate(order)}
            found = found.select([place.get(row) for row in range(len(rows))])
        trees: DraftTrees = found
        return trees

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
        if not self.kernels.on_device or stops_early:
            levels = self._padded_levels(rows, depths, self.branching, noise_keys, None, packet)
            given = depths if stops_early else None
            return lambda roots: self._searched(self.search(levels, roots, rows, given), rows, depths)
        bounds = self._bounds_of(rows, depths, graphs)
        levels = self._padded_levels(rows, depths, self.branching, noise_keys, graphs, packet, bounds)
        eager = partial(self.search_nodes, levels, rows=rows)
        run = eager if graphs is None else graphs.loop_of(levels, packet)
        assert levels.bounds is not None
        sizes = levels.bounds.sizes
        return lambda roots: _without_padding(run(roots).trees(sizes), len(rows))

    def _bounds_of(
        self, rows: Sequence[DraftRow], depths: Sequence[int], graphs: "LoopGraphs[Any] | None"
    ) -> MakeBounds:
        """Return what makes the bounds of rows, with padding rows where a graph runs the search."""
        padding = 0 if graphs is None else graphs.padding(len(rows))
        budgets, deepest = _padded_bounds(rows, depths, len(rows) + padding)
        most = 0 if graphs is None else self.shape.nodes
        return lambda depth, packet: TreeBounds.of(budgets, deepest, depth, self.branching, packet, most)

    def search_nodes(self, levels: DraftLevels, roots: Tensor, rows: Sequence[DraftRow] = ()) -> SearchedNodes:
        """Run the loop over levels, and return the trees as they stay on the device; see `search`."""
        assert levels.bounds is not None
        return self.search(levels, roots, rows).nodes(levels.bounds)

    def _searched(self, search: TreeSearch, rows: Sequence[DraftRow], depths: Sequence[int]) -> DraftTrees:
        """Return the trees of a search on the host, or of one whose levels the host did not know beforehand."""
        budgets, deepest = _padded_bounds(rows, depths, search.num_rows)
        if not self.kernels.on_device:
            return search.host_trees(budgets, deepest)
        packet = Packet(self.kv.device)
        bounds = TreeBounds.of(budgets, deepest, search.num_levels, self.branching, packet)
        packet.send()
        return search.nodes(bounds).trees(bounds.sizes)

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
        bounds = None if drawn else self._bounds_of(rows, [self.shape.depth] * len(rows), graphs)
        levels = self._padded_levels(rows, (), width, keys_of, graphs, packet, bounds)
        graphs.capture(capture, levels, packet, read)

    def _padded_levels(
        self,
        rows: Sequence[DraftRow],
        depths: Sequence[int],
        width: int,
        keys_of: Callable[[Sequence[Context]], list[NoiseKey | None]],
        graphs: "LoopGraphs[Any] | None",
        packet: Packet,
        bounds: MakeBounds | None = None,
    ) -> DraftLevels:
        """Return the inputs of the loop over levels: of all levels and with padding rows where a graph runs it."""
        if graphs is None:
            depth = max(depths)
        else:
            depth = self.shape.depth
            rows = [*rows, *[self._padding_row()] * graphs.padding(len(rows))]
        keys = keys_of([row.context for row in rows])
        return self._levels(rows, depth, width, keys, packet, for_graph=graphs is not None, bounds=bounds)

    def _padding_row(self) -> DraftRow:
        """Return a row whose nodes lie in the null block."""
        block = self.kv.shape[1] // self.block_size - 1
        table = [block] * ceil_div(2 + self.shape.slots, self.block_size)
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
        firsts, none = [max(row.draft_start, self.first) for row in rows], HostTrees.empty(len(rows))
        if self.graphs is None:
            run: Pass = self.read
            packed = TreeBatch.pack_into(packet, parts, none, self.block_size, first=self.first, firsts=firsts)
        else:
            packed = self.graphs.reading.pack(packet, parts, none, firsts)
            run = self.graphs.reading.pass_of(packed, packet)
        return lambda: (packed.batch, run(packed.complete()))

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
