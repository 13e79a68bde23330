"""Number of draft nodes of each row, from the tokens and blocks that known tokens leave. Pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.request import Request
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.step_plan import StepBudget
from specdec.scheduling.tree_sizer import DraftableRow, TreeSize, TreeSizer


@dataclass(frozen=True)
class DraftBudget:
    """Bounds of what a step drafts.

    Attributes:
        shape: bounds of a tree; a request may ask for narrower ones.
        context: number of tokens from which on a request gets no drafts.
        most_read: limit of the tokens that the draft head reads in a step, so that a long prompt makes no step long.
        tree_sizer: chooses tree sizes by the load; None for trees as large as there is room.
    """

    shape: DraftShape
    context: int
    most_read: int
    tree_sizer: TreeSizer | None = None

    def size(self, decoding: Sequence[Request]) -> TreeSize:
        """Choose the trees of requests that compute one known token each."""
        rows = [self._draftable(request) for request in decoding if self._can_draft(request)]
        if self.tree_sizer is None:
            return TreeSize(self.shape.nodes, len(rows))
        return self.tree_sizer.size(len(decoding), len(decoding), rows)

    def _can_draft(self, request: Request) -> bool:
        return request.may_draft and len(request.token_ids) < self.context

    def _draftable(self, request: Request) -> DraftableRow:
        """Return the request with the bounds of its tree: the engine's, or its own where these are narrower."""
        shape, own = self.shape, request.params.speculation
        nodes = shape.nodes if own.max_nodes is None else min(shape.nodes, own.max_nodes)
        depth = shape.depth if own.max_depth is None else min(shape.depth, own.max_depth)
        return DraftableRow(request.acceptance_history, nodes, depth)

    def grant(self, step: StepBudget, size: TreeSize, manager: KVCacheManager, turn: int) -> None:
        """Divide the tokens that are left among the rows that can use drafts.

        Args:
            step: with all rows of known tokens planned.
            size: limit of each tree's nodes, and the number of trees.
            turn: number of the step, which picks the row of a lone tree.
        """
        shape, most_read = self.shape, self.most_read
        rows = [row for row in step.rows if row.sampled and row.num_known == 1 and self._can_draft(row.request)]
        bounds = [self._draftable(row.request) for row in rows]
        step.stats.drafts_asked += sum(bound.nodes for bound in bounds)
        if rows and size.nodes and size.trees == 1:
            # A lone tree is to show the acceptance of all ranks, so its row is one that may have the most nodes.
            widest = max(bound.nodes for bound in bounds)
            able = [place for place, bound in enumerate(bounds) if bound.nodes == widest]
            lone = able[turn % len(able)]
            rows, bounds = [rows[lone]], [bounds[lone]]
        for index, (row, bound) in enumerate(zip(rows, bounds, strict=True)):
            most = min(size.nodes, bound.nodes, step.tokens // (len(rows) - index))
            if most <= 0:
                continue
            request = row.request
            manager.catch_up(request)
            row.draft_prefill_end = min(len(request.token_ids), request.num_draft_cached + most_read)
            most_read -= row.draft_prefill_end - request.num_draft_cached
            if row.draft_prefill_end < len(request.token_ids):
                # The head has read too little of a long prompt; the request gets drafts in a later step.
                continue
            # The target adds one token to the drafts, so they can be one level less than the tokens that remain.
            depth = min(bound.depth, request.num_remaining - 1)
            end = request.num_cached + 1
            # While drafting, the nodes expanded at each level but the last have slots too.
            room = manager.extend(request, end + max(most, (depth - 1) * shape.branching)) - end
            most = min(most, room)
            if most <= 0:
                continue
            row.num_nodes = most
            # A tree has no more levels than nodes.
            row.max_depth = min(depth, most, room // shape.branching + 1)
            step.stats.drafts_granted += most
            step.tokens -= most
