"""Who runs in the coming step, and with how many tokens and draft nodes. Pure Python, first come first served."""

from collections import deque
from typing import NamedTuple

from specdec.block_pool import BlockPool
from specdec.draft_heads.drafter import DraftShape
from specdec.request import Request


class PlannedRow(NamedTuple):
    """A request's part of the coming step.

    Attributes:
        num_known: tokens of its chain, `token_ids[num_cached : num_cached + num_known]`.
        num_nodes: most draft nodes under the chain's end.
        max_depth: levels of them that could still be emitted.
    """

    request: Request
    num_known: int
    num_nodes: int
    max_depth: int

    @property
    def sampled(self) -> bool:
        """Whether the chain reaches the last known token, after which one is sampled."""
        return self.request.num_cached + self.num_known == len(self.request.token_ids)


class Scheduler:
    """Running requests first, in order of arrival, then prompts as far as tokens, seats and blocks go.

    A request is admitted once there are blocks for the longest it may become, so a running one never lacks
    memory and is never preempted.

    Args:
        pool: blocks of the cache.
        shape: bounds of draft trees, None where nothing drafts.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, shape: DraftShape | None
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.shape = shape
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def blocks_needed(self, request: Request) -> int:
        """Blocks for the request at its longest, with a draft tree behind it."""
        entries = request.max_length + (self.shape.slots if self.shape else 0)
        return -(-entries // self.block_size)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the cache could never hold it.
        """
        needed = self.blocks_needed(request)
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"a request of up to {request.max_length} tokens needs {needed} cache blocks of {self.block_size}, "
                f"and there are {self.pool.num_blocks}; lower max_tokens or raise kv_cache_memory"
            )
        self.waiting.append(request)

    def schedule(self) -> list[PlannedRow]:
        """Rows of the coming step; empty if nothing is left to do."""
        budget = self.max_num_batched_tokens
        plan: list[PlannedRow] = []
        for request in self.running:
            budget -= self._plan(request, budget, plan)
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            needed = self.blocks_needed(request)
            if needed > self.pool.num_free:
                break
            request.block_table = self.pool.allocate(needed)
            self.running.append(request)
            self.waiting.popleft()
            budget -= self._plan(request, budget, plan)
        return plan

    def _plan(self, request: Request, budget: int, plan: list[PlannedRow]) -> int:
        """Add the request's row, if the budget has anything for it; the known tokens it takes."""
        missing = len(request.token_ids) - request.num_cached
        known = min(missing, budget)
        if known == 0:
            return 0
        # The step's own token is the last of those that may come, so drafts can be one level less.
        max_depth = request.num_remaining - 1
        drafts = self.shape is not None and request.drafts and missing == 1 and max_depth > 0
        nodes = self.shape.nodes if self.shape is not None and drafts else 0
        plan.append(PlannedRow(request, known, nodes, max_depth))
        return known

    def release(self, request: Request) -> None:
        """Take back everything from a request that has ended, wherever it was when it did."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.pool.free(request.block_table)
        request.block_table = []
