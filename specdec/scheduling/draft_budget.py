"""How many draft nodes the rows of a step get: what known tokens leave of its tokens and blocks. Pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.engine_stats import EngineStats
from specdec.core.request import Request
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.plan import PlannedRow
from specdec.scheduling.tree_sizer import TreeSize, TreeSizer


@dataclass(frozen=True)
class DraftBudget:
    """Bounds of what is drafted.

    Attributes:
        shape: of a tree.
        context: tokens from which on a request is not drafted for any more.
        reads: tokens that the draft head reads in a step at most, so that a long prompt makes no step long.
        worth: fits trees to the load; None where they are always as large as there is room.
    """

    shape: DraftShape
    context: int
    reads: int
    worth: TreeSizer | None = None

    def blocks(self, request: Request, manager: KVCacheManager) -> int:
        """Blocks that the request would have with the largest tree."""
        return manager.blocks_for(len(request.token_ids) + self.shape.slots)

    def size(self, decoding: Sequence[Request]) -> TreeSize:
        """Trees for requests that will add one token each to a step."""
        records = [request.acceptance_history for request in decoding if self._can_draft(request)]
        if self.worth is None:
            return TreeSize(self.shape.nodes, len(records))
        return self.worth.size(len(decoding), len(decoding), records)

    def _can_draft(self, request: Request) -> bool:
        return request.may_draft and len(request.token_ids) < self.context

    def grant(
        self, rows: list[PlannedRow], size: TreeSize, budget: int, manager: KVCacheManager, counts: EngineStats
    ) -> int:
        """Spread what is left over the rows that can use drafts.

        Args:
            rows: of the step.
            size: of trees, and how many of them.
            budget: tokens left.

        Returns:
            Tokens left then.
        """
        shape, reads = self.shape, self.reads
        rows = [row for row in rows if row.sampled and row.num_known == 1 and self._can_draft(row.request)]
        counts.drafts_asked += shape.nodes * len(rows)
        if size.nodes and size.trees == 1:
            rows = [rows[counts.steps % len(rows)]] if rows else []
        for index, row in enumerate(rows):
            most = min(size.nodes, budget // (len(rows) - index))
            if most <= 0:
                continue
            request = row.request
            manager.catch_up(request)
            row.draft_prefill_end = min(len(request.token_ids), request.num_draft_cached + reads)
            reads -= row.draft_prefill_end - request.num_draft_cached
            if row.draft_prefill_end < len(request.token_ids):
                # It has read little of a long prompt yet, and drafts later.
                continue
            # The step's own token is the last of those that may come, so drafts can be one level less.
            depth = min(shape.depth, request.num_remaining - 1)
            end = request.num_cached + 1
            # While drafting, each level but the last lies in the cache, too.
            room = manager.extend(request, end + max(most, (depth - 1) * shape.branching)) - end
            most = min(most, room)
            if most <= 0:
                continue
            row.num_nodes = most
            # A tree has no more levels than nodes.
            row.max_depth = min(depth, most, room // shape.branching + 1)
            counts.drafts_granted += most
            budget -= most
        return budget
