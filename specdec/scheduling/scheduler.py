"""Which requests run in the coming step, with how many tokens and draft nodes. Pure Python."""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.engine_stats import EngineStats
from specdec.core.errors import QueueFullError, wrong
from specdec.core.request import Request
from specdec.kernels.types.settings import ParameterError
from specdec.kv_transfer.kv_connector import KVConnector
from specdec.scheduling.draft_budget import DraftBudget
from specdec.scheduling.rank_values import TreeOutcome
from specdec.scheduling.request_queues import RequestQueues
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.scheduling.step_cost import MeasuredStep, StepCost
from specdec.scheduling.step_plan import PlannedRow, RowResult, StepBudget, StepPlan
from specdec.scheduling.step_planner import MOST_NODES, StepPlanner
from specdec.scheduling.tree_sizer import TreeSize

# Waiting requests whose blocks are hashed while a step runs.
LOOK_AHEAD = 8


class Scheduler:
    """Advances requests step by step: a loop in which their cached tokens catch up with their known ones.

    `StepPlanner` plans known tokens, in order of rank. `DraftBudget` gives draft nodes the tokens and blocks that are
    left. The requests' cache counters are written here after a step, and by `KVCacheManager` where blocks come and go.

    Args:
        draft_budget: gives rows their draft nodes.
        step_cost: of a step's parts; without it, prompts are bounded by tokens alone.
        passes_ahead: whether the pass of a plain step may be launched behind the step before; see `StepPlan.followed`.
        connector: loads and stores blocks beyond the cache; None for none.
        share: returns the value of each rank for one of this rank; see `Ranks.share`.
        max_choice_nodes: limit of the nodes of a tree of choices, from the kernels.

    Attributes:
        max_choice_nodes: the same, as far as steps have tokens for them.
        running, waiting: requests with and without a seat, in order of rank; only the queues change them.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        draft_budget: DraftBudget,
        step_cost: StepCost | None = None,
        *,
        passes_ahead: bool = False,
        connector: KVConnector | None = None,
        share: Callable[[Any], list[Any]] = lambda value: [value],
        max_choice_nodes: int = MOST_NODES,
    ) -> None:
        self._share = share
        # One token of a step is kept for each of the other requests.
        most_nodes = min(config.max_num_batched_tokens - config.max_num_seqs, manager.bounds.most_known - 1)
        self.max_choice_nodes = min(max_choice_nodes, most_nodes)
        self.manager, self.config, self.step_cost, self.connector = manager, config, step_cost, connector
        manager.reports_published = connector is not None
        self.draft_budget = draft_budget
        self.queues = RequestQueues(config.scheduling_policy)
        self.running, self.waiting = self.queues.running, self.queues.waiting
        self.planner = StepPlanner(self.queues, manager, config, connector)
        self._stats = EngineStats()
        self._in_flight: list[PlannedRow] = []
        self._passes_ahead = passes_ahead and connector is None
        self._followed: list[Request] = []

    def free_seats(self, leaving: Collection[Request]) -> int:
        """Return how many requests could run besides the running ones that are not `leaving`."""
        return self.config.max_num_seqs - sum(request not in leaving for request in self.running)

    def refusal(self, request: Request) -> ValueError | QueueFullError | None:
        """Return why the request cannot be queued, a ValueError if it never can; None if it can; see `add`."""
        if request.priority and self.config.scheduling_policy != "priority":
            return wrong("priority", f"{request.priority} needs scheduling_policy 'priority'; it is 'fcfs'")
        if request.choices is not None and request.choices.most_nodes > self.max_choice_nodes:
            return wrong(
                "choices",
                f"holds one of {request.choices.most_nodes + 1} tokens; it may have at most "
                f"{self.max_choice_nodes + 1}: shorten it, or raise max_num_batched_tokens",
            )
        manager = self.manager
        if manager.bounds.most_blocks(request.max_length - 1) > manager.pool.num_blocks:
            return ParameterError(
                "max_tokens",
                f"a request of up to {request.max_length} tokens needs {manager.blocks_for(request.max_length - 1)} "
                f"cache blocks of {manager.block_size}, and there are {manager.pool.num_blocks}; lower max_tokens or "
                "raise kv_cache_memory",
            )
        limit = self.config.max_queued_requests
        if limit is None:
            return None
        waiting = (*self.waiting, *self.queues.waiting_for_kv)
        # Samples of one prompt, which share this dict, wait as one request.
        prompts = {id(each.cached_samples) for each in waiting}
        # No client's requests fill the queue for others.
        is_first = all(each.client != request.client for each in waiting)
        if len(prompts) < limit or id(request.cached_samples) in prompts or is_first:
            return None
        return QueueFullError(f"{limit} requests wait, as many as may; try again later")

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: a request that the cache can never hold, or that has a priority under the policy "fcfs", or a
                choice that no tree holds.
            QueueFullError: `max_queued_requests` requests wait.
        """
        if (refusal := self.refusal(request)) is not None:
            raise refusal
        request.times.queued = time.monotonic()
        self.queues.add(request, self._stats.steps)
        self._stats.queued += 1

    def fork(self, parent: Request, child: Request) -> None:
        """Queue a child that shares the parent's cached tokens; it runs at once if the parent does.

        The caller ensures that at most `max_num_seqs` requests run in the next step.
        """
        runs = bool(parent.block_table)
        if runs:
            self.manager.fork(parent, child)
        self.queues.add_child(parent, child, runs)
        self._stats.queued += 1

    def look_ahead(self) -> None:
        """Hash the blocks of the requests that wait first, for the next step's prefix search."""
        for request in self.waiting[:LOOK_AHEAD]:
            self.manager.hash_blocks(request)

    def schedule(self, clock: float | None = None) -> StepPlan:
        """Plan the coming step, without rows if nothing can run. `update` or `cancel` must follow.

        Args:
            clock: the only time on which the plan depends, in seconds; None for that of the monotonic clock.
        """
        assert not self._in_flight, "the last step has not ended"
        if self._followed and (plan := self._launched_plan()).rows:
            return plan
        if self.connector is not None:
            self.connector.begin_step(time.monotonic() if clock is None else clock)
            for rank, output in enumerate(self._share(self.connector.get_finished())):
                self.connector.update_connector_output(output, rank)
            self.queues.resume()
        decoding = [request for request in self.running if len(request.token_ids) - request.num_cached == 1]
        admits = bool(self.waiting) and len(self.running) < self.config.max_num_seqs
        mixed = admits or len(decoding) < len(self.running)
        size = self.draft_budget.size(decoding, mixed=mixed)
        # One token is kept for each decoding request, so that no prompt delays an output.
        stats, most = self._stats, self.config.max_num_batched_tokens
        step = StepBudget(stats, most, self._prompt_tokens(decoding, size), len(decoding))
        self.planner.plan(step)
        self.planner.plan_choices(step, self.max_choice_nodes)
        # A list, which takes half the time of a generator: this runs over the rows of each step.
        known = sum([row.num_known for row in step.rows])
        self.draft_budget.grant(step, size, self.manager)
        if self.connector is not None:
            self.connector.start_read_kv(self.connector.build_read_meta())
        plan = StepPlan(step.rows)
        if step.rows:
            plan.moves = self.manager.take_moves()
            self._in_flight = step.rows
            stats.count_step(known, most - step.tokens)
            self._follow(plan)
        return plan

    def _launched_plan(self) -> StepPlan:
        """Return the step whose pass is launched, of the requests that have not ended. Others wait for the next one."""
        followed, self._followed = self._followed, []
        rows = [PlannedRow(request, 1, sampled=True) for request in followed if not request.finished]
        self._stats.passes_wasted += len(followed) - len(rows)
        plan = StepPlan(rows, is_launched=True)
        if rows:
            self._in_flight = rows
            self._stats.count_step(len(rows), len(rows))
            if (sizer := self.draft_budget.tree_sizer) is not None:
                sizer.goes_on_plainly(len(rows))
            self._follow(plan)
        return plan

    def _follow(self, plan: StepPlan) -> None:
        """Have the pass of the next step launched behind this one, if that step has the same rows and no drafts.

        A request that comes meanwhile waits for the step after that, as it would if it came a step later.
        """
        if not self._passes_ahead or self.waiting or len(plan.rows) != len(self.running) or self.manager.moves:
            return
        drafts = not self.draft_budget.stays_plain(len(plan.rows))
        followed = []
        for row in plan.rows:
            request = row.request
            if row.num_known > 1 or not row.sampled or row.num_nodes or row.num_chained or not request.may_follow:
                return
            if (drafts or request.chain_sources) and request.params.speculation.enabled and request.drafts_enabled:
                return
            # A request that has its last token with this step needs no other.
            if len(request.token_ids) + 1 < request.max_length:
                followed.append(request)
        if all(self.manager.extend(one, one.num_cached + 2) >= one.num_cached + 2 for one in followed):
            plan.followed = self._followed = followed

    def _prompt_tokens(self, requests: Sequence[Request], size: TreeSize) -> int:
        """Return how many prompt tokens fit beside requests that compute one known token each, with trees of a size.

        Now and then 0, so that the cost of the other rows is measured, but not while a prompt has the first rank.
        """
        if self.step_cost is None:
            return sys.maxsize
        # Nodes of choices count as a prompt's tokens.
        decoding = [request.choices for request in requests].count(None)
        prompts = len(self.running) - decoding + len(self.waiting)
        if not prompts or not decoding:
            return sys.maxsize
        first = self.running[0]
        is_first = first.num_uncached_tokens == 1 and not (self.waiting and self.waiting[0].rank < first.rank)
        stretch, cost = self.config.prefill_stretch, self.step_cost
        if stretch and is_first and cost.is_due(decoding, decoding + size.trees * size.nodes):
            return 0
        levels = min(size.nodes, self.draft_budget.shape.depth)
        return cost.prompt_tokens(stretch, prompts, decoding, size.nodes, size.trees, levels)

    def blocks_with_drafts(self, request: Request) -> int:
        """Return how many blocks the request would have with the largest tree."""
        return self.manager.blocks_for(len(request.token_ids) + self.draft_budget.slots)

    def update(self, plan: StepPlan, results: Sequence[RowResult]) -> None:
        """Update cached-token counts, publish full blocks to the prefix cache, release finished requests.

        Args:
            results: one per row; their requests have taken the tokens.
        """
        self._in_flight = []
        stats, commit = self._stats, self.manager.commit
        for row, result in zip(plan.rows, results, strict=True):
            request = row.request
            request.drafts_enabled = not result.needs_retry
            if not result.needs_retry and request.finish_reason != "abort":
                if row.draft_prefill_end > request.num_draft_cached:
                    request.num_draft_cached = row.draft_prefill_end
                # Nothing behind the last known token counts as cached.
                known, computed = len(request.token_ids), request.num_cached + row.num_known + result.num_accepted
                if request.choices is not None and request.finish_reason is None:
                    # The last one is computed again, with further choices below it.
                    known -= 1
                request.num_cached = computed if computed < known else known
                if request.error is None:
                    commit(request)
                elif not request.sampling.forbids:
                    # The model's values are not finite, which may pass: later requests must compute their own.
                    self.manager.withdraw(request)
                stats.generated_tokens += result.num_new
                if result.num_nodes:
                    stats.count_tree(result.num_nodes, result.num_accepted, result.num_new, request.adapter)
            if request.finish_reason is not None:
                self._release(request)

    def cancel(self, plan: StepPlan) -> None:
        """End a step that failed; its requests stay as they were."""
        self._in_flight, self._followed = [], []
        for row in plan.rows:
            del row.request.logprobs[row.request.num_output :]
            if row.request.finished:
                self._release(row.request)

    def learn(self, measured: MeasuredStep, outcomes: Sequence[TreeOutcome]) -> None:
        """Correct the predicted costs by a step's measured ones, and the trees' values by their outcomes."""
        self._stats.draft_seconds += measured.draft_seconds
        self._stats.verify_seconds += measured.seconds
        if self.step_cost is not None:
            self.step_cost.correct(measured)
        if (sizer := self.draft_budget.tree_sizer) is not None and outcomes:
            sizer.learn(outcomes)

    def begin_with_draft(self, rank_values: Sequence[float]) -> None:
        """Forget what was learnt of the draft model, which another one replaces; see `TreeSizer.begin_with`."""
        if (sizer := self.draft_budget.tree_sizer) is not None:
            sizer.begin_with(rank_values)

    def abort(self, request: Request) -> None:
        """End a request now. If it is in the running step, its blocks are kept until the step ends."""
        if request.finished:
            return
        request.finish_reason = "abort"
        if all(row.request is not request for row in self._in_flight):
            self._release(request)

    def finish(self, request: Request) -> None:
        """End a request well, between steps; it keeps its output, and the scores of the token after it."""
        assert not self._in_flight, "the step has not ended"
        if not request.finished:
            request.finish_reason = "stop"
            self._release(request)

    def count_output(self, num_tokens: int) -> None:
        """Count generated tokens that no step has appended to a request: those of a beam search's sequences."""
        self._stats.generated_tokens += num_tokens

    def fail(self, request: Request, message: str) -> None:
        """End a request with an error, between steps."""
        assert not self._in_flight, "the step has not ended"
        if not request.finished:
            request.fail(message)
            self._release(request)

    def _release(self, request: Request) -> None:
        if not self.queues.remove(request):
            return
        self.manager.release(request)
        # It holds the request: a cycle, which the collector would have to find.
        request.draftable = None
        if self.connector is not None:
            self.connector.request_finished(request)
        if request.finish_reason == "abort":
            self._stats.aborted += 1
        else:
            self._stats.finished += 1

    def stats(self) -> EngineStats:
        """Return a snapshot of the counts and of the present state."""
        pool, sizer = self.manager.pool, self.draft_budget.tree_sizer
        return replace(
            self._stats,
            trees_by_accepted=dict(self._stats.trees_by_accepted),
            steps_by_tokens=dict(self._stats.steps_by_tokens),
            adapters=deepcopy(self._stats.adapters),
            running=len(self.running),
            waiting=len(self.waiting) + len(self.queues.waiting_for_kv),
            waiting_for_kv=len(self.queues.waiting_for_kv),
            num_blocks=pool.num_blocks,
            kv_usage=1 - pool.num_free / pool.num_blocks,
            outlook=None if sizer is None else sizer.outlook,
        )
