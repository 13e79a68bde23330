"""Number of draft nodes of each row, from the tokens and blocks that known tokens leave. Pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.request import Request
from specdec.draft_heads.drafting.chains import ChainTree
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.step_plan import PlannedRow, StepBudget
from specdec.scheduling.tree_sizer import DraftableRow, TreeSize, TreeSizer, first_values


@dataclass(frozen=True)
class DraftBudget:
    """Bounds of what a step drafts.

    Attributes:
        shape: bounds of a tree; a request may ask for narrower ones.
        context: number of tokens from which on the draft model drafts nothing for a request; 0 without a model.
        most_read: limit of the tokens that the draft head reads in a step, so that a long prompt makes no step long.
        tree_sizer: chooses tree sizes by the load; None for trees as large as there is room.
        draws: whether the model's trees of requests that sample are drawn from q. Their acceptance rule knows no tree
            of drawn nodes and others, so a row has either these or chains, whichever are worth more.
    """

    shape: DraftShape
    context: int
    most_read: int
    tree_sizer: TreeSizer | None = None
    draws: bool = False
    # Bounds of the requests of the step that is being planned.
    _bounds: dict[Request, DraftableRow] = field(default_factory=dict, init=False, repr=False)

    def size(self, decoding: Sequence[Request]) -> TreeSize:
        """Choose the trees of requests that compute one known token each."""
        sizer, bounds = self.tree_sizer, self._bounds
        bounds.clear()
        has_chains = any(request.chain_sources for request in decoding)
        if not (self.context or has_chains):
            return TreeSize(0, 0)
        if sizer is None:
            return TreeSize(self.shape.nodes, sum(request.may_draft for request in decoding))
        if not has_chains and sizer.goes_on_plainly(len(decoding)):
            return TreeSize(0, 0)
        bounds |= {request: self._draftable(request) for request in decoding if request.may_draft}
        return sizer.size(len(decoding), len(decoding), [row for row in bounds.values() if row.nodes or row.chains])

    def _draftable(self, request: Request) -> DraftableRow:
        """Return the request with the bounds of its tree: the engine's, or its own where these are narrower."""
        own, most, depth = request.params.speculation, self.shape.nodes, self.shape.depth
        if own.max_nodes is not None:
            most = min(most, own.max_nodes)
        if own.max_depth is not None:
            depth = min(depth, own.max_depth)
        row = DraftableRow(request.acceptance_history, most if len(request.token_ids) < self.context else 0, depth)
        chains = self._chains(request) if request.chain_sources else None
        return row if chains is None else row._replace(chains=chains.values[:most], share=1 - chains.first_value)

    def _most_nodes(self, request: Request) -> int:
        own = request.params.speculation.max_nodes
        return self.shape.nodes if own is None else min(self.shape.nodes, own)

    def _chains(self, request: Request) -> ChainTree | None:
        """Return the request's chains. They may be as long as trees have nodes, since no level costs a pass."""
        own = request.params.speculation.max_depth
        return request.chains(self.shape.nodes if own is None else min(self.shape.nodes, own))

    def grant(self, step: StepBudget, size: TreeSize, manager: KVCacheManager, turn: int) -> None:
        """Divide the tokens that are left among the rows that can use drafts.

        Args:
            step: with all rows of known tokens planned.
            size: limit of each tree's nodes, and the number of trees.
            turn: number of the step, which picks the row of a lone tree.
        """
        if not size.nodes and not any(row.request.chain_sources for row in step.rows):
            return
        known = self._bounds
        rows = [
            row
            for row in step.rows
            if row.sampled and row.num_known == 1 and (row.request in known or row.request.may_draft)
        ]
        bounds = [known.get(row.request) or self._draftable(row.request) for row in rows]
        for row in rows:
            if row.request.chain_sources:
                row.chains = self._chains(row.request)
        step.stats.drafts_asked += sum(map(self._most, rows, bounds))
        widest = max((bound.nodes for bound in bounds), default=0)
        if widest and size.nodes and size.trees == 1:
            # A lone tree is to show the acceptance of all ranks, so its row is one that may have the most nodes.
            able = [place for place, bound in enumerate(bounds) if bound.nodes == widest]
            lone = able[turn % len(able)]
            bounds = [bound if place == lone else bound._replace(nodes=0) for place, bound in enumerate(bounds)]
        left = [place for place, bound in enumerate(bounds) if (bound.nodes and size.nodes) or bound.chains]
        most_read = self.most_read
        for index, place in enumerate(left):
            row, bound = rows[place], bounds[place]
            room = min(self._most(row, bound), step.tokens // (len(left) - index))
            drafted, chained = self._split(row.request, size, bound, room)
            if drafted:
                manager.catch_up(row.request)
                end, start = len(row.request.token_ids), row.request.num_draft_cached
                row.draft_prefill_end = min(end, start + most_read)
                most_read -= row.draft_prefill_end - start
                if row.draft_prefill_end < end:
                    # The head has read too little of a long prompt; the request gets its drafts in a later step.
                    bound = bound._replace(nodes=0)
                    drafted, chained = self._split(row.request, size, bound, room)
            if drafted + chained:
                self._extend(row, bound, drafted, chained, size, manager)
                step.stats.drafts_granted += row.num_nodes + row.num_chained
                step.tokens -= row.num_nodes + row.num_chained

    def _most(self, row: PlannedRow, bound: DraftableRow) -> int:
        """Return the most nodes that a row may have, of all sources."""
        return self._most_nodes(row.request) if bound.chains else bound.nodes

    def _split(self, request: Request, size: TreeSize, bound: DraftableRow, room: int) -> tuple[int, int]:
        """Return how many nodes the model drafts for a row, and how many come from chains: the best that have room."""
        drafted = min(size.nodes, bound.nodes, room)
        if not bound.chains:
            return drafted, 0
        values = first_values(self.shape.nodes) if self.tree_sizer is None else self.tree_sizer.values
        chained = min(sum(value >= size.least_value for value in bound.chains), room)
        if self.draws and not request.sampling.is_greedy:
            return (drafted, 0) if sum(values[:drafted]) > sum(bound.chains[:chained]) else (0, chained)
        if self.tree_sizer is not None:
            drafted = self.tree_sizer.num_drafted(bound.share, drafted)
        while drafted + chained > room:
            if drafted and (not chained or bound.share * values[drafted - 1] <= bound.chains[chained - 1]):
                drafted -= 1
            else:
                chained -= 1
        return drafted, chained

    def _extend(
        self, row: PlannedRow, bound: DraftableRow, drafted: int, chained: int, size: TreeSize, manager: KVCacheManager
    ) -> None:
        """Give a row the cache entries of its nodes, or as many nodes as there are entries."""
        request, branching = row.request, self.shape.branching
        # The target adds one token to the drafts, so they can be one level less than the tokens that remain.
        depth = min(bound.depth, request.num_remaining - 1)
        end = request.num_cached + 1
        # While drafting, the nodes expanded at each level but the last have slots too.
        scratch = (depth - 1) * branching if drafted else 0
        room = manager.extend(request, end + max(drafted + chained, scratch)) - end
        if room < drafted + chained:
            drafted, chained = self._split(request, size, bound, max(room, 0))
        row.num_nodes, row.num_chained = drafted, chained
        if drafted:
            # A tree has no more levels than nodes.
            row.max_depth = min(depth, drafted, room // branching + 1)
