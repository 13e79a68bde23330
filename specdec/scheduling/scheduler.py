"""Who runs in the coming step, with how many tokens and draft nodes, and who has to wait. Pure Python."""

import itertools
import sys
from bisect import insort
from collections.abc import Iterator, Sequence
from enum import Enum

from specdec.cache.kv_cache_manager import KVCacheManager, Prefix
from specdec.core.engine_stats import EngineStats
from specdec.core.request import Request
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.draft_budget import DraftBudget
from specdec.scheduling.plan import Plan, PlannedRow, Tally
from specdec.scheduling.prefill_limit import PrefillLimit
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.scheduling.step_cost import PreemptionCost, StepCost
from specdec.scheduling.tree_sizer import TreeSize, TreeSizer


class Admission(Enum):
    """Whether a request can be queued."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class QueueFullError(RuntimeError):
    """As many requests wait as may; try again later."""


# A request is overtaken by those of the next lower priority number only if they arrive within so many steps.
PRIORITY_STEPS = 1000
# Waiting requests that are made ready while a step runs.
LOOK_AHEAD = 8


class Scheduler:
    """One loop in which the cached tokens of requests catch up with the known ones.

    Requests have a rank: their order of arrival, or with the policy "priority" the step they arrived in plus
    `PRIORITY_STEPS` times their priority. In this order they get tokens, and those that wait are admitted if there is a
    seat and all their known tokens have blocks. Whoever lacks a seat or a block takes it first from drafts, then
    from the running request that ranks last, if that is behind, which is preempted. Draft nodes get what tokens and
    blocks are left at the end.

    So nobody waits for anyone who ranks behind, and who ranks first goes on in every step. A request is therefore
    admitted within as many steps as there are tokens, at their longest, in all that rank before it; what of these is
    preempted for later arrivals of higher priority, and computed again, counts once more.

    Args:
        manager: blocks of the cache.
        config: limits.
        shape: bounds of draft trees, None where nothing drafts.
        cost: of preemption in either way.
        draft_context: tokens from which on a request is not drafted for any more.
        step_cost: of a step's parts; without it, trees and prompts are bounded by tokens alone.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        shape: DraftShape | None = None,
        cost: PreemptionCost | None = None,
        draft_context: int = sys.maxsize,
        step_cost: StepCost | None = None,
    ) -> None:
        self.manager, self.config = manager, config
        self.step_cost = step_cost
        self.drafts = None
        if shape is not None:
            # A step adds no more than this to what the head has not read.
            reads = config.max_num_batched_tokens + config.max_num_seqs
            worth = TreeSizer(step_cost, shape) if step_cost is not None and config.adaptive_drafts else None
            self.drafts = DraftBudget(shape, draft_context, reads, worth)
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

    def look_ahead(self) -> None:
        """What the next step needs and the outcome of this one does not change: names of who waits first."""
        for request in self.waiting[:LOOK_AHEAD]:
            self.manager.hash_blocks(request)

    def schedule(self) -> Plan:
        """The coming step; no rows if nothing is left to do. `update` or `cancel` must follow."""
        assert not self._in_flight, "the last step has not ended"
        plan = Plan()
        decoding = [request for request in self.running if request.num_uncached_tokens == 1]
        size = self.drafts.size(decoding) if self.drafts is not None else TreeSize(0, 0)
        budget = self._plan_known(plan, len(decoding), size)
        if self.drafts is not None:
            budget = self.drafts.grant(plan.rows, size, budget, self.manager, self.counts)
        if plan.rows:
            plan.moves, self.manager.moves = self.manager.moves, []
            self._in_flight = plan.rows
            counts = self.counts
            counts.steps += 1
            counts.known_tokens += sum(row.num_known for row in plan.rows)
            counts.step_tokens = self.config.max_num_batched_tokens - budget
        return plan

    def _plan_known(self, plan: Plan, decoding: int, size: TreeSize) -> int:
        """Rows of known tokens, in the order of rank; the tokens left.

        Args:
            decoding: running requests that need just one token: it is kept for them, so that no prompt makes an
                output wait.
            size: of the trees that these may get.
        """
        prompts = sys.maxsize
        if self.step_cost is not None and len(self.running) + len(self.waiting) > decoding > 0:
            levels = min(size.nodes, self.drafts.shape.depth) if self.drafts is not None else 0
            count = len(self.running) - decoding + len(self.waiting)
            prompts = PrefillLimit(self.step_cost, self.config.prefill_stretch).tokens(count, decoding, *size, levels)
        step = Tally(plan, self.config.max_num_batched_tokens, prompts, decoding)
        while True:
            runs = self.running[step.place] if step.place < len(self.running) else None
            waits = None
            if step.admits and step.passed < len(self.waiting):
                waits = self.waiting[step.passed]
            if waits is not None and (runs is None or waits.rank < runs.rank):
                self._plan_waiting(waits, step)
            elif runs is not None:
                self._plan_running(runs, step)
            else:
                return step.budget

    def _plan_running(self, request: Request, step: Tally) -> None:
        """Its row, with memory taken from those behind; or its own preemption."""
        missing = len(request.token_ids) - request.num_cached
        step.place += 1
        if missing == 0:
            return
        if missing == 1:
            step.singles -= 1
            known = 1
        else:
            known = self._share(missing, step)
            if known <= 0 or (known < missing and step.partial >= self.config.max_num_partial_prefills):
                return
        while not self.manager.reserve(request, request.num_cached + known):
            if self._reclaim():
                continue
            # Nobody is admitted into what has just been taken.
            step.admits = False
            if self.running[-1] is request:
                # It counts no more among those who need just one.
                step.singles += missing == 1
                self._preempt_last(step)
                return
            self._preempt_last(step)
        step.take(request, known, missing)

    def _plan_waiting(self, request: Request, step: Tally) -> None:
        """Admit it, pass it over, or close the door to all behind it; what it needs is taken from those behind."""
        config, manager = self.config, self.manager
        last = self.running[-1] if self.running and self.running[-1].rank > request.rank else None
        full = len(self.running) + step.seats_kept >= config.max_num_seqs
        # A token that is kept for who is to make way counts as well.
        tokens = step.budget - step.singles + (last is not None and last.num_uncached_tokens == 1)
        step.admits = tokens > 0 and (not full or last is not None) and request not in step.victims
        if not step.admits:
            return
        ahead = self.running[: step.place]
        prefix = None if request.host_blocks else manager.find_prefix(request)
        if prefix is not None and manager.is_being_prefilled(request, prefix, ahead):
            step.admits = False
            return
        room = self._room(self.running) - step.blocks_kept
        lacking = self._blocks_lacking(request, prefix)
        if prefix is not None and lacking > room and prefix.num_tokens % manager.block_size:
            prefix = _whole_blocks(prefix, manager.block_size)
            lacking = self._blocks_lacking(request, prefix)
        missing = len(request.token_ids) - (request.num_cached if prefix is None else prefix.num_tokens)
        known = self._share(missing, step)
        if missing > 1 and step.prompt_budget <= 0:
            step.admits = False
        elif missing == 0:
            # A beam that was swapped out and waits for its search.
            step.passed += 1
        elif max(known, 1) < missing and step.partial >= config.max_num_partial_prefills:
            # Others may go first, but not into its seat or its blocks.
            step.passed += 1
            step.seats_kept += 1
            step.blocks_kept += lacking
        elif full or lacking > room or known <= 0:
            held = sum(len(other.block_table) for other in self.running[step.place :])
            step.admits = last is not None and lacking <= self._room(ahead) + held - step.blocks_kept
            if step.admits:
                self._preempt_last(step)
        else:
            del self.waiting[step.passed]
            if lacking > manager.pool.num_free:
                self._reclaim()
            self._admit(request, prefix, known)
            self.running.insert(step.place, request)
            step.place += 1
            step.take(request, known, missing)

    def _share(self, missing: int, step: Tally) -> int:
        """Tokens of a step for a prompt that lacks so many."""
        limit = self.config.long_prefill_token_threshold or missing
        if missing > 1:
            limit = min(limit, step.prompt_budget)
        return min(missing, limit, step.budget - step.singles)

    def _room(self, running: Sequence[Request]) -> int:
        """Blocks that an admission can take.

        Those that drafts have count, those that `running` ones still need for what is known of them do not.
        """
        size = self.manager.block_size
        claimed = sum(-(-len(request.token_ids) // size) - len(request.block_table) for request in running)
        return self.manager.pool.num_free - claimed - (self._watermark if running else 0)

    def _admit(self, request: Request, prefix: Prefix | None, known: int) -> None:
        """Give a waiting request its memory; the caller has seen that there is enough."""
        if prefix is None:
            self.manager.swap_in(request)
        else:
            self.manager.take_prefix(request, prefix)
            self.counts.prefix_queries += len(request.token_ids)
            self.counts.prefix_hits += prefix.num_tokens
        reserved = self.manager.reserve(request, request.num_cached + known)
        assert reserved, "an admitted request has its blocks"

    def _reclaim(self) -> bool:
        """Take back the blocks that only drafts have used; whether there were any."""
        before = self.manager.pool.num_free
        for request in self.running:
            self.manager.trim(request)
        return self.manager.pool.num_free > before

    def _preempt_last(self, step: Tally) -> None:
        """Take the memory of who ranks last of those running; it goes on, token for token, when its turn comes."""
        victim = self.running.pop()
        step.singles -= victim.num_uncached_tokens == 1
        step.victims.append(victim)
        self.counts.preemptions += 1
        blocks = self.manager.blocks_for(victim.num_cached)
        if self.cost.prefers_swap(victim.num_cached, blocks) and self.manager.swap_out(victim):
            self.counts.swaps += 1
        else:
            self.manager.release(victim)
        insort(self.waiting, victim, key=_rank)

    def _blocks_lacking(self, request: Request, prefix: Prefix | None) -> int:
        """Blocks that admitting the request, and computing all that is known of it, takes from the free ones."""
        total = self.manager.blocks_for(len(request.token_ids))
        if prefix is None:
            return total
        unheld = sum(self.manager.pool.is_free(block) for block in prefix.blocks)
        copied = 1 if prefix.num_tokens % self.manager.block_size else 0
        return total - len(prefix.blocks) + copied + unheld

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
        for row in plan.rows:
            del row.request.logprobs[row.request.num_output :]
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
    return Prefix(prefix.blocks[:count], count * block_size, min(prefix.num_draft_cached, count * block_size))
