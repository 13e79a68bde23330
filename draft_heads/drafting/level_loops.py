"""The loops of a draft model over the levels of trees, searched or drawn, and its reading of known tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import DraftLevels
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow, DraftsAhead, Proposal
from specdec.draft_heads.drafting.tree_draw import DrawSizes, TreeDraw
from specdec.draft_heads.drafting.tree_search import Searched, TreeSearch
from specdec.draft_heads.heads.draft_head import CachedHead
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.adapters import AdapterBank
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.fused import DraftingCache, FusedDrafting, FusedPasses
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.tree import TreeRow
from specdec.kernels.types.tree_search import Frontier
from specdec.kernels.types.types import Candidates, Stream, TopK
from specdec.kernels.types.upload import Packet
from specdec.verify.sampling import Context, Sampling
from specdec.verify.tree_batch import TreeBatch
from specdec.verify.verifier import noise_key, noise_keys

if TYPE_CHECKING:
    # Importing it imports Triton, which an engine on plain torch does not need.
    from specdec.draft_heads.drafting.draft_graphs import DraftGraphs, LoopGraphs, Unread
    from specdec.kernels.triton.attention_plan import Capture

# What the loop over levels carries from one level to the next.
State = TypeVar("State")


class LevelLoops(ABC, Generic[State]):
    """The loops over the levels of EAGLE-2's trees; a subclass scores the children of a frontier.

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
        graphs: CUDA graphs of drafting, or None.
        one_call: the drafter in one call; None where the kernel set or the head does not have it.
    """

    def __init__(
        self,
        head: CachedHead,
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
        self.head, self.readout, self.adapters = head, readout, adapters
        self.kernels, self.shape = kernels, shape
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
        # Of a head that is called level by level, by width of the levels.
        self._own_bits: dict[int, Tensor] = {}
        self.one_call: FusedDrafting | None = None
        if kernels.passes is not None and readout.is_whole:
            cache = DraftingCache(kv, self.features, self.rope, block_size, self.first, self.branching)
            self.one_call = self._fused(kernels.passes, cache)

    @abstractmethod
    def _fused(self, passes: FusedPasses, cache: DraftingCache) -> FusedDrafting | None:
        """Return the drafter in one call by these kernels, None where the head has parts that they do not know."""

    @abstractmethod
    def read(self, batch: TreeBatch) -> Tensor:
        """Write the head's entries of known tokens; return their states `[tokens, size]`."""

    @abstractmethod
    def _roots(self, states: Tensor, batch: TreeBatch, last: Tensor | None) -> Tensor:
        """Return what drafting begins with, `[rows, size]`.

        Args:
            states: of `read`, of a batch of known tokens.
            last: int64 `[rows]`, the packed row of each last token; None where the rows are these alone.
        """

    @abstractmethod
    def _pass_bits(self, depth: int, width: int) -> Tensor:
        """Return the ancestor bits of the rows of each pass over nodes, int64 `[passes, rows, words]`.

        Args:
            depth: levels of the trees.
            width: nodes of a frontier.
        """

    @abstractmethod
    def _begin(self, levels: DraftLevels, roots: Tensor, rows: Sequence[DraftRow], *, drawn: bool) -> State:
        """Return the state of the roots.

        Args:
            roots: of `_roots`.
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

    def read_and_search(self, batch: TreeBatch, last: Tensor, levels: DraftLevels) -> Searched:
        """Read known tokens, and run the loop of a search behind them; return candidates that stay on the device.

        Args:
            last: see `_roots`.
        """
        return self.search(levels, self._roots(self.read(batch), batch, last)).candidates()

    def read_and_draw(
        self, batch: TreeBatch, last: Tensor, levels: DraftLevels, probs: Tensor | None = None
    ) -> TreeDraw:
        """Read known tokens, and run the loop of drawn trees behind them.

        Args:
            last: see `_roots`.
            probs: see `draw`.
        """
        return self.draw(levels, self._roots(self.read(batch), batch, last), probs=probs)

    def capture(self, capture: "Capture", rows: Sequence[DraftRow], *, drawn: bool) -> None:
        """Capture drafting for as many rows as these, which belong to no request.

        Args:
            capture: `CudaGraphs.capture` on a GPU.
            rows: a power of two of them.
            drawn: whether the trees are drawn.
        """
        assert self.graphs is not None
        graphs: LoopGraphs[Any] = self.graphs.draw if drawn else self.graphs.search
        packet = Packet(self.kv.device)
        unread = self._unread(rows, graphs, packet)
        levels = self._levels(rows, (), graphs, packet, drawn=drawn)
        graphs.capture(capture, unread, levels, packet)

    def _levels(
        self,
        rows: Sequence[DraftRow],
        depths: Sequence[int],
        graphs: "LoopGraphs[Any] | None",
        packet: Packet,
        *,
        drawn: bool,
        ahead: int = 0,
    ) -> DraftLevels:
        """Return the inputs of the loop over levels, which are there once the packet is sent.

        Args:
            depths: of the rows' trees; where a graph runs the loop, it has all levels, and padding rows.
            drawn: whether the trees are drawn, with noise keyed by the current step, so that no step uses that of
                another; see `PhiloxChance`. Those that are searched have the noise of the roots' children.
            ahead: see `DraftLevels.start`.
        """
        depth, tables = self.shape.depth, None
        if graphs is None:
            depth = max(depths)
        else:
            tables = graphs.tables
            padding = DraftRow(tables.null_table, 1, 2, 0, 0, Context(Sampling(), [0, 0], 1))
            rows = [*rows, *[padding] * graphs.padding(len(rows))]
        contexts = [row.context for row in rows]
        keys = [noise_key(context) for context in contexts] if drawn else noise_keys(contexts)
        width = self.draw_sizes.width if drawn else self.branching
        bits, dtype = self._pass_bits(depth, width), torch.promote_types(self.dtype, torch.float32)
        given = rows, depth, width, self.block_size, bits, keys, self.first, dtype, packet
        is_block = self.head.block is not None
        return DraftLevels.start(*given, graph_tables=tables, is_block=is_block, ahead=ahead)

    def search(
        self, levels: DraftLevels, roots: Tensor, rows: Sequence[DraftRow] = (), depths: list[int] | None = None
    ) -> TreeSearch:
        """Run the loop over levels; without logit edits and with `min_reach` 0 the host does not wait for the device.

        Args:
            levels: inputs of all levels.
            roots: `[rows, size]` of `_roots`.
            rows: not needed in that case.
            depths: levels of each row, lowered where a deeper level is less probable than `min_reach`; None to draft
                all levels.
        """
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
        own = None if probs is None else probs[: levels.num_rows]
        draw = TreeDraw(levels.num_rows, self.draw_sizes, levels.depth, self.kernels.search, own)
        state = self._begin(levels, roots, rows, drawn=True)
        for level in range(1, levels.depth + 1):
            log_q = self._log_q(state, levels, level, rows, draw.frontier_paths)
            candidates = Candidates(log_q.clone(), log_q.shape[1])
            count = min(draw.count, log_q.shape[1])
            noise = levels.noise_at(level - 1)
            children = self.kernels.search.perturbed_top_k(candidates, noise, count, Stream.DRAFT, level)
            by_row, tokens = (part.view(levels.num_rows, -1, part.shape[1]) for part in (log_q, children.tokens))
            frontier = draw.expand(by_row, tokens, levels.own_bits_at(level))
            if level < levels.depth:
                state = self._expand(levels, frontier, state, level)
        return draw

    def _parts(self, rows: Sequence[DraftRow]) -> list[TreeRow]:
        """Return the tokens of rows that are to be read."""
        starts = [max(row.num_draft_cached, self.first) for row in rows]
        return [
            TreeRow(row.token_ids[start : row.draft_prefill_end], start, row.block_table, 1, row.adapter)
            for row, start in zip(rows, starts, strict=True)
        ]

    def _firsts(self, rows: Sequence[DraftRow]) -> list[int]:
        """Return the first entry of each row that holds something."""
        return [max(row.draft_start, self.first) for row in rows]

    def _reading(self, rows: Sequence[DraftRow], packet: Packet) -> Callable[[], Tensor]:
        """Return what reads the tokens of rows, once the packet is sent, and returns what drafting begins with."""
        packed = TreeBatch.pack_into(
            packet,
            self._parts(rows),
            HostTrees.empty(len(rows)),
            self.block_size,
            first=self.first,
            firsts=self._firsts(rows),
        )

        def roots() -> Tensor:
            batch = packed.complete()
            return self._roots(self.read(batch), batch, batch.logit_rows)

        return roots

    def _unread(self, rows: Sequence[DraftRow], graphs: "LoopGraphs[Any]", packet: Packet) -> "Unread":
        """Return the tokens that a graph reads before it drafts for rows."""
        return graphs.pack(self._parts(rows), self._firsts(rows), packet)

    def _coming(self, rows: Sequence[DraftRow], graphs: "LoopGraphs[Any]", packet: Packet) -> "Unread":
        """Return the same of the tokens that a step brings, which the device writes there."""
        most = self.shape.tokens
        parts = [TreeRow([0] * most, len(row.token_ids), row.block_table, 1, row.adapter) for row in rows]
        return graphs.pack(parts, self._firsts(rows), packet, coming=most - 1)

    def _adapt(self, rows: RaggedRows) -> None:
        """Have the head's next products adapt these rows."""
        if self.adapters is not None:
            self.adapters.use(rows)
