"""Who runs in the coming step, with how many tokens and draft nodes, and who has to wait. Pure Python."""

import itertools
import sys
from bisect import insort
from collections.abc import Iterator, Sequence
from enum import Enum

from specdec.draft_heads.draft_shape import DraftShape
from specdec.engine_stats import EngineStats
from specdec.kv_cache_manager import KVCacheManager, Prefix
from specdec.plan import Plan, PlannedRow
from specdec.preemption_cost import PreemptionCost
from specdec.request import Request
from specdec.scheduler_config import SchedulerConfig

# A request is overtaken by those of the next lower priority number only if they arrive within so many steps.
PRIORITY_STEPS = 1000


class Admission(Enum):
    """Whether a request can be queued."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class QueueFullError(RuntimeError):
    """As many requests wait as may; try again later."""


class Scheduler:
    """One loop in which the cached tokens of requests catch up with the known ones.

    Requests have a rank: their order of arrival, or with the policy "priority" the step they arrived in plus
    `PRIORITY_STEPS` times their priority. In this order the running ones get their tokens, then waiting ones
    are admitted, whose known tokens all have blocks. Whoever lacks a block takes it first from drafts, then from the
    running request that ranks last, which is preempted. Draft nodes get what tokens and blocks are left at the end.

    So nobody waits for anyone who ranks behind, except for those who were running first: the running request
    that ranks first is never preempted and gets at least one token in every step. A request is therefore admitted
    within as many steps as there are tokens, at their longest, in all that rank before it or ran when it came.

    Args:
        manager: blocks of the cache.
        config: limits.
        shape: bounds of draft trees, None where nothing drafts.
        cost: of preemption in either way.
        draft_context: tokens from which on a request is not drafted for any more.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        shape: DraftShape | None = None,
        cost: PreemptionCost | None = None,
        draft_context: int = sys.maxsize,
    ) -> None:
        self.manager, self.config, self.shape, self.draft_context = manager, config, shape, draft_context
        self.cost = cost or PreemptionCost()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.counts = EngineStats()
        self._arrivals = itertools.count()
        self._in_flight: list[PlannedRow] = []
        # Least blocks free after an admission.
        self._watermark = int(config.watermark * manager.pool.num_blocks)

    def admission(self, request: Request) -> Admission:
        """Whether the request can be queued now, later or never."""
        if self.manager.blocks_for(request.max_length - 1) > self.manager.pool.num_blocks:
            return Admission.NEVER
        limit = self.config.max_queued_requests
        return Admission.OK if limit is None or len(self.waiting) < limit else Admission.LATER

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the cache could never hold it, or it has a priority and the policy knows none.
            QueueFullError: too many wait.
        """
        if request.priority and self.config.scheduling_policy != "priority":
            raise ValueError(f"priority {request.priority} needs scheduling_policy 'priority'; it is 'fcfs'")
        match self.admission(request):
            case Admission.NEVER:
                size, pool = self.manager.block_size, self.manager.pool
                raise ValueError(
                    f"a request of up to {request.max_length} tokens needs "
                    f"{self.manager.blocks_for(request.max_length - 1)} cache blocks of {size}, "
                    f"and there are {pool.num_blocks}; lower max_tokens or raise kv_cache_memory"
                )
            case Admission.LATER:
                raise QueueFullError(f"{len(self.waiting)} requests wait, as many as may; try again later")
        step = self.counts.steps if self.config.scheduling_policy == "priority" else 0
        request.rank = (step + PRIORITY_STEPS * request.priority, next(self._arrivals), 0)
        insort(self.waiting, request, key=_rank)
        self.counts.queued += 1

    def fork(self, parent: Request, child: Request) -> None:
        """Queue a child that shares the parent's cached tokens; it runs at once if the parent does.

        The caller keeps to `max_num_seqs` by the next step.
        """
        child.rank = (parent.rank[0], parent.rank[1], next(self._arrivals))
        self.counts.queued += 1
        if parent.block_table:
            self.manager.fork(parent, child)
            insort(self.running, child, key=_rank)
        else:
            insort(self.waiting, child, key=_rank)

    def schedule(self) -> Plan:
        """The coming step; no rows if nothing is left to do. `update` or `cancel` must follow."""
        assert not self._in_flight, "the last step has not ended"
        plan = Plan()
        budget, partial, preempted = self._plan_running(plan)
        if not preempted:
            budget = self._admit(plan, budget, partial)
        if self.shape is not None:
            budget = self._grant_drafts(plan, self.shape, budget)
        if plan.rows:
            plan.moves, self.manager.moves = self.manager.moves, []
            self._in_flight = plan.rows
            counts = self.counts
            counts.steps += 1
            counts.known_tokens += sum(row.num_known for row in plan.rows)
            counts.step_tokens = self.config.max_num_batched_tokens - budget
        return plan

    def _plan_running(self, plan: Plan) -> tuple[int, int, bool]:
        """Rows of running requests; the tokens left, the prompts still under way, whether any was preempted."""
        budget = self.config.max_num_batched_tokens
        longest = self.config.long_prefill_token_threshold or budget
        running = self.running
        # A token is kept for everyone who needs just one, so that no prompt makes an output wait.
        singles = sum(len(request.token_ids) - request.num_cached == 1 for request in running)
        partial, place, preempted = 0, 0, False
        while place < len(running):
            request = running[place]
            missing = len(request.token_ids) - request.num_cached
            place += 1
            if missing == 0:
                continue
            if missing == 1:
                singles -= 1
                known = 1
            else:
                known = min(missing, longest, budget - singles)
                if known <= 0:
                    partial += 1
                    continue
            end = request.num_cached + known
            while not self.manager.reserve(request, end):
                if self._reclaim():
                    continue
                victim = running.pop()
                preempted = True
                if victim is not request and victim.num_missing == 1:
                    singles -= 1
                self._preempt(victim)
                if victim is request:
                    break
            else:
                partial += known < missing
                budget -= known
                plan.rows.append(PlannedRow(request, known, known == missing))
        return budget, partial, preempted

    def _reclaim(self) -> bool:
        """Take back the blocks that only drafts have used; whether there were any."""
        before = self.manager.pool.num_free
        for request in self.running:
            self.manager.trim(request)
        return self.manager.pool.num_free > before

    def _preempt(self, victim: Request) -> None:
        """Take a running request's memory; it goes on, token for token, when its turn comes again."""
        self.counts.preemptions += 1
        blocks = self.manager.blocks_for(victim.num_cached)
        if self.cost.prefers_swap(victim.num_cached, blocks) and self.manager.swap_out(victim):
            self.counts.swaps += 1
        else:
            self.manager.release(victim)
        insort(self.waiting, victim, key=_rank)

    def _admit(self, plan: Plan, budget: int, partial: int) -> int:
        """Rows of requests that begin or go on; the tokens left."""
        config, manager = self.config, self.manager
        if not self.waiting or budget == 0 or len(self.running) >= config.max_num_seqs:
            return budget
        self._reclaim()
        longest = config.long_prefill_token_threshold or budget
        seats = config.max_num_seqs - len(self.running)
        # Blocks that requests before this one still need for what is known of them.
        claimed = sum(max(0, manager.blocks_for(len(r.token_ids)) - len(r.block_table)) for r in self.running)
        place = 0
        while place < len(self.waiting) and seats > 0 and budget > 0:
            request = self.waiting[place]
            prefix = None if request.host_blocks else manager.find_prefix(request)
            if prefix is not None and manager.is_under_way(request, prefix, self.running):
                break
            room = manager.pool.num_free - claimed - (self._watermark if self.running else 0)
            lacking = self._blocks_lacking(request, prefix)
            if lacking > room and prefix is not None and prefix.num_tokens % manager.block_size:
                prefix = _whole_blocks(prefix, manager.block_size)
                lacking = self._blocks_lacking(request, prefix)
            if lacking > room:
                break
            cached = request.num_cached if prefix is None else prefix.num_tokens
            missing = len(request.token_ids) - cached
            known = min(missing, budget, longest)
            if known == 0:
                # A beam that was swapped out and waits for its search.
                place += 1
                continue
            seats -= 1
            if known < missing and partial >= config.max_num_partial_prefills:
                # Others may go first, but not into its seat or its blocks.
                claimed += lacking
                place += 1
                continue
            del self.waiting[place]
            if prefix is None:
                manager.swap_in(request)
            else:
                manager.take_prefix(request, prefix)
                self.counts.prefix_queries += len(request.token_ids)
                self.counts.prefix_hits += prefix.num_tokens
            reserved = manager.reserve(request, cached + known)
            assert reserved, "an admitted request has its blocks"
            claimed += max(0, manager.blocks_for(len(request.token_ids)) - len(request.block_table))
            insort(self.running, request, key=_rank)
            partial += known < missing
            budget -= known
            plan.rows.append(PlannedRow(request, known, known == missing))
        return budget

    def _blocks_lacking(self, request: Request, prefix: Prefix | None) -> int:
        """Blocks that admitting the request, and computing all that is known of it, takes from the free ones."""
        total = self.manager.blocks_for(len(request.token_ids))
        if prefix is None:
            return total
        unheld = sum(self.manager.pool.is_free(block) for block in prefix.blocks)
        copied = 1 if prefix.num_tokens % self.manager.block_size else 0
        return total - len(prefix.blocks) + copied + unheld

    def _grant_drafts(self, plan: Plan, shape: DraftShape, budget: int) -> int:
        """Spread the tokens and blocks that are left over the rows that can use drafts; the tokens left then."""
        rows = [row for row in plan.rows if row.sampled and row.num_known == 1 and row.request.may_draft]
        rows = [row for row in rows if len(row.request.token_ids) < self.draft_context]
        # What the draft head reads is bounded, too, by what a step can add to it: a long prompt makes no step long.
        reads = self.config.max_num_batched_tokens + self.config.max_num_seqs
        self.counts.drafts_asked += shape.nodes * len(rows)
        for index, row in enumerate(rows):
            nodes = min(shape.nodes, budget // (len(rows) - index))
            if nodes <= 0:
                continue
            request = row.request
            self.manager.catch_up(request)
            row.read_to = min(len(request.token_ids), request.num_read + reads)
            reads -= row.read_to - request.num_read
            if row.read_to < len(request.token_ids):
                # It has read little of a long prompt yet, and drafts later.
                continue
            # The step's own token is the last of those that may come, so drafts can be one level less.
            depth = min(shape.depth, request.num_remaining - 1)
            end = request.num_cached + 1
            # While drafting, each level but the last lies in the cache, too.
            room = self.manager.extend(request, end + max(nodes, (depth - 1) * shape.branching)) - end
            nodes = min(nodes, room)
            if nodes <= 0:
                continue
            row.num_nodes = nodes
            row.max_depth = min(depth, room // shape.branching + 1)
            self.counts.drafts_granted += nodes
            budget -= nodes
        return budget

    def blocks_with_drafts(self, request: Request) -> int:
        """Blocks that the request would have with the largest tree."""
        slots = self.shape.slots if self.shape else 0
        return self.manager.blocks_for(len(request.token_ids) + slots)

    def update(self, plan: Plan, accepted: Sequence[int | None]) -> None:
        """Count what a step has cached, once its tokens are appended, and let go of requests that have ended.

        Args:
            accepted: per row the draft tokens that are now known ones, in place in the cache; None where the row's
                result has not been applied.
        """
        self._in_flight = []
        for row, path in zip(plan.rows, accepted, strict=True):
            request = row.request
            if path is not None:
                # Nothing behind the kept tokens counts as cached.
                end = request.num_cached + row.num_known + path
                request.num_cached = min(end, len(request.token_ids))
                self.manager.commit(request)
                self.counts.drafts_accepted += path
            if request.finished:
                self._end(request)

    def cancel(self, plan: Plan) -> None:
        """The step has come to nothing: its rows stay as they were."""
        self.update(plan, [None] * len(plan.rows))

    def abort(self, request: Request) -> None:
        """End a request now. If it is in the running step, its blocks are kept until that has ended."""
        if request.finished:
            return
        request.finish_reason = "abort"
        if all(row.request is not request for row in self._in_flight):
            self._end(request)

    def _end(self, request: Request) -> None:
        queue = self.running if request in self.running else self.waiting
        if request not in queue:
            return
        queue.remove(request)
        self.manager.release(request)
        if request.finish_reason == "abort":
            self.counts.aborted += 1
        else:
            self.counts.finished += 1

    def stats(self) -> EngineStats:
        """The counts, and the state at this moment."""
        pool, counts = self.manager.pool, self.counts
        counts.running, counts.waiting = len(self.running), len(self.waiting)
        counts.swapped = sum(bool(request.host_blocks) for request in self.waiting)
        counts.kv_usage = 1 - pool.num_free / pool.num_blocks
        return counts

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(self.running, self.waiting)

    def check_integrity(self) -> None:
        """Queues are in order, and all memory is accounted for.

        Raises:
            AssertionError: what is not.
        """
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_rank), "a queue is out of order"
        assert len({id(request) for request in self}) == len(self.running) + len(self.waiting), "queued twice"
        assert not any(request.block_table for request in self.waiting), "a waiting request holds blocks"
        assert not any(request.host_blocks for request in self.running), "a running request is swapped out"
        self.manager.check_integrity(self)


def _rank(request: Request) -> tuple[int, int, int]:
    return request.rank


def _whole_blocks(prefix: Prefix, block_size: int) -> Prefix:
    """The prefix without its last, partly used block."""
    count = prefix.num_tokens // block_size
    return Prefix(prefix.blocks[:count], count * block_size, min(prefix.num_read, count * block_size))
