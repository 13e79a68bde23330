"""Number of draft nodes of each row, from the tokens and blocks that known tokens leave. Pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.draftable_row import DraftableRow
from specdec.core.request import Request
from specdec.draft_heads.drafting.chains import ChainTree
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.rank_values import first_values
from specdec.scheduling.step_plan import PlannedRow, StepBudget
from specdec.scheduling.tree_sizer import TreeSize, TreeSizer

# Share of the requests that may be new before trees are chosen anew: others may draft well or badly, and have text
# that the head must read. Each choice takes some time.
MOST_NEW = 0.2


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
        reads_prompts: whether the draft head reads each part of a prompt in the step that computes it, rather than
            when it first drafts.
        follows: whether a row with a tree has entries for the next one too, which is drafted ahead; see `DraftsAhead`.
    """

    shape: DraftShape
    context: int
    most_read: int
    tree_sizer: TreeSizer | None = None
    draws: bool = False
    reads_prompts: bool = False
    follows: bool = False
    # Bounds of the requests of the step that is being planned.
    _bounds: dict[Request, DraftableRow] = field(default_factory=dict, init=False, repr=False)
    # Requests that the present choice of trees was made for.
    _chosen_for: set[Request] = field(default_factory=set, init=False, repr=False)

    @property
    def slots(self) -> int:
        """Cache entries that a row with the largest tree takes behind its known tokens."""
        return self.shape.slots_ahead if self.follows else self.shape.slots

    def size(self, decoding: Sequence[Request], *, mixed: bool = False) -> TreeSize:
        """Choose the trees of requests that compute one known token each.

        Args:
            mixed: whether the step may compute prompts too.
        """
        sizer, bounds = self.tree_sizer, self._bounds
        bounds.clear()
        has_chains = any(request.chain_sources for request in decoding)
        if not (self.context or has_chains):
            # Requests that have ended are not kept.
            self._chosen_for.clear()
            return TreeSize(0, 0)
        if sizer is None:
            most = [self._most_nodes(request) for request in decoding if request.may_draft]
            return TreeSize(max(most, default=0), len(most))
        # Without Python's loop: it runs over the rows of each step.
        if sum(map(self._chosen_for.__contains__, decoding)) < (1 - MOST_NEW) * len(decoding):
            self._chosen_for.clear()
            self._chosen_for.update(decoding)
            sizer.choose_anew()
        if not has_chains and sizer.goes_on_plainly(len(decoding), mixed=mixed):
            return TreeSize(0, 0)
        for request in decoding:
            if request.may_draft:
                bounds[request] = self._draftable(request)
        return sizer.size(len(decoding), len(decoding), list(bounds.values()), mixed=mixed)

    def stays_plain(self, sampled: int) -> bool:
        """Return whether the step after this one drafts nothing, if it has as many rows that yield a token."""
        if not self.context:
            return True
        return self.tree_sizer is not None and self.tree_sizer.stays_plain(sampled)

    def _draftable(self, request: Request) -> DraftableRow:
        """Return the request with the bounds of its tree in the coming step."""
        row = request.draftable or self._widest(request)
        if len(request.token_ids) >= self.context:
            row = row._replace(nodes=0)
        if not request.chain_sources:
            return row
        chains = self._chains(request)
        if chains is None:
            return row
        return row._replace(chains=chains.values[: self._most_nodes(request)], share=1 - chains.first_value)

    def _widest(self, request: Request) -> DraftableRow:
        """Return the request with the engine's bounds of a tree, or its own where these are narrower."""
        own, depth = request.params.speculation.max_depth, self.shape.depth
        depth = depth if own is None else min(depth, own)
        request.draftable = DraftableRow(
            request.acceptance_history, self._most_nodes(request), depth, ahead=request.ahead
        )
        return request.draftable

    def _most_nodes(self, request: Request) -> int:
        own = request.params.speculation.max_nodes
        return self.shape.nodes if own is None else min(self.shape.nodes, own)

    def _chains(self, request: Request) -> ChainTree | None:
        """Return the request's chains. They may be as long as trees have nodes, since no level costs a pass."""
        own = request.params.speculation.max_depth
        return request.chains(self.shape.nodes if own is None else min(self.shape.nodes, own))

    def grant(self, step: StepBudget, size: TreeSize, manager: KVCacheManager) -> None:
        """Divide the tokens that are left among the rows that can use drafts.

        Args:
            step: with all rows of known tokens planned.
            size: limit of each tree's nodes, and the number of trees.
        """
        most_read = self._read_prompts(step, manager) if self.reads_prompts else self.most_read
        if not size.nodes and not any(row.request.chain_sources for row in step.rows):
            return
        rows = self._draftable_rows(step, size)
        if size.nodes and size.trees == 1:
            rows = self._alone(rows, size.turn)
        for index, row in enumerate(rows):
            bound = self._bounds[row.request]
            most = self._most_nodes(row.request) if bound.chains else bound.nodes
            room = min(most, step.tokens // (len(rows) - index))
            most_read -= self._grant_row(row, bound, size, room, manager, most_read)
            granted = row.num_nodes + row.num_chained
            step.stats.drafts_granted += granted
            step.tokens -= granted

    def _read_prompts(self, step: StepBudget, manager: KVCacheManager) -> int:
        """Let the head read the prompts' rows of the step; return how many tokens it may read besides."""
        most_read = self.most_read
        for row in step.rows:
            request = row.request
            in_prompt = request.num_cached < request.num_prompt and len(request.token_ids) < self.context
            may_follow = request.params.speculation.enabled and request.drafts_enabled and request.choices is None
            if in_prompt and may_follow:
                manager.catch_up(request)
                start, end = request.num_draft_cached, request.num_cached + row.num_known
                row.draft_prefill_end = min(end, start + most_read)
                most_read -= row.draft_prefill_end - start
        return most_read

    def _draftable_rows(self, step: StepBudget, size: TreeSize) -> list[PlannedRow]:
        """Return the rows that may have drafts, with their chains and bounds, and count the drafts they ask for."""
        rows, asked, bounds = [], 0, self._bounds
        for row in step.rows:
            if row.sampled and row.num_known == 1:
                request = row.request
                bound = bounds.get(request)
                if bound is None and request.may_draft:
                    bound = bounds[request] = self._draftable(request)
                if bound is None:
                    continue
                if bound.chains:
                    row.chains = self._chains(request)
                    asked += self._most_nodes(request)
                else:
                    asked += bound.nodes
                if bound.nodes and bound.history.ratio < size.least_ratio:
                    bound = bounds[request] = bound._replace(nodes=0)
                if bound.chains or (bound.nodes and size.nodes):
                    rows.append(row)
        step.stats.drafts_asked += asked
        return rows

    def _alone(self, rows: list[PlannedRow], turn: int) -> list[PlannedRow]:
        """Let the model draft for one of the rows with the largest tree, whose acceptance then stands for the batch."""
        bounds = self._bounds
        widest = max((bounds[row.request].nodes for row in rows), default=0)
        able = [row for row in rows if bounds[row.request].nodes == widest]
        lone = able[turn % len(able)] if able else None
        for row in rows:
            if row is not lone:
                bounds[row.request] = bounds[row.request]._replace(nodes=0)
        return [row for row in rows if row is lone or bounds[row.request].chains]

    def _grant_row(
        self, row: PlannedRow, bound: DraftableRow, size: TreeSize, room: int, manager: KVCacheManager, most_read: int
    ) -> int:
        """Give a row at most `room` nodes, and the cache entries that these need; return the tokens the head reads."""
        # This runs for each row of each step: conditions in place of `min` save a tenth of its time.
        request, read = row.request, 0
        known = len(request.token_ids)
        if bound.chains:
            drafted, chained = self._split(request, size, bound, room)
        else:
            drafted, chained = size.nodes if size.nodes < room else room, 0
        if drafted:
            manager.catch_up(request)
            read = known - request.num_draft_cached
            row.draft_prefill_end = known
            if read > most_read:
                # The head has read too little of a long prompt; the request gets its drafts in a later step.
                read, row.draft_prefill_end = most_read, request.num_draft_cached + most_read
                bound = bound._replace(nodes=0)
                drafted, chained = self._split(request, size, bound, room)
        if not drafted + chained:
            return read
        # The target adds one token to the drafts, so they can be one level less than the tokens that remain.
        left = request.max_length - known - 1
        depth = bound.depth if bound.depth < left else left
        # While drafting, the nodes expanded at each level but the last have slots too.
        scratch = self.shape.scratch(depth) if drafted else 0
        if drafted and self.follows:
            scratch = self.shape.slots_ahead
        nodes, end = drafted + chained, request.num_cached + 1
        free = manager.extend(request, end + (nodes if nodes > scratch else scratch)) - end
        if drafted and not self.shape.depth_within(free, depth):
            # There is no room for the rows of a block.
            bound = bound._replace(nodes=0)
            drafted, chained = self._split(request, size, bound, room)
            nodes = drafted + chained
        if free < nodes:
            drafted, chained = self._split(request, size, bound, max(free, 0))
        row.num_nodes, row.num_chained = drafted, chained
        if drafted:
            # A tree has no more levels than nodes.
            depth = depth if depth < drafted else drafted
            row.max_depth = self.shape.depth_within(free, depth)
        return read

    def _split(self, request: Request, size: TreeSize, bound: DraftableRow, room: int) -> tuple[int, int]:
        """Return how many nodes the model drafts for a row, and how many come from chains: the best that have room."""
        drafted = min(size.nodes, bound.nodes, room)
        if not bound.chains:
            return drafted, 0
        values = first_values(self.shape.nodes) if self.tree_sizer is None else self.tree_sizer.ranks.values
        chained = min(sum(value >= size.least_value for value in bound.chains), room)
        if self.draws and not request.sampling.is_greedy:
            return (drafted, 0) if sum(values[:drafted]) > sum(bound.chains[:chained]) else (0, chained)
        if self.tree_sizer is not None:
            drafted = self.tree_sizer.ranks.num_drafted(bound.share, drafted)
        while drafted + chained > room:
            if drafted and (not chained or bound.share * values[drafted - 1] <= bound.chains[chained - 1]):
                drafted -= 1
            else:
                chained -= 1
        return drafted, chained
