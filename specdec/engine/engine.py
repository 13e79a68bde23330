"""The step: schedule, draft, one forward pass, verify, commit."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import overload
from weakref import WeakValueDictionary

from specdec.config import EngineConfig
from specdec.core.commands import (
    Abort,
    Add,
    AnyCommand,
    CheckIntegrity,
    Close,
    Control,
    Done,
    EndSearches,
    EngineReply,
    GetStats,
    Integrity,
    LoadAdapter,
    RunStep,
    Search,
    Stats,
    Stop,
    Told,
    UnloadAdapter,
    Unloaded,
    UpdateDraft,
)
from specdec.core.device import StepScope, on_device
from specdec.core.request import Request, RequestGroup
from specdec.core.sampling_params import BeamSearchParams
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.engine.adapters import EngineAdapters
from specdec.engine.beam_search import BeamRequest, BeamSearch, BeamSearches
from specdec.engine.request_maker import RequestMaker
from specdec.engine.request_ring import RequestRing
from specdec.engine.step_observer import StepObserver
from specdec.engine.step_results import row_results, time_without_drafts, trace_of
from specdec.execution.executor import Executor
from specdec.execution.step_order import StepOrder
from specdec.execution.worker import Worker
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.settings import one_line
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.kv_transfer.cache_identity import checkpoint_identity, identity
from specdec.kv_transfer.kv_connector import KVConnector
from specdec.models.hub import shown_path
from specdec.parallel.ranks import REFUSALS, RankDeadError
from specdec.scheduling.integrity import check_scheduler
from specdec.scheduling.rank_values import read_values
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.step_plan import PlannedRow, RowResult, StepPlan

# Seconds that an engine waits for blocks when it has nothing else to do.
KV_WAIT = 0.002

logger = logging.getLogger(__name__)


class LLMEngine:
    """Runs many requests at a time, step by step, to their end.

    Every row of a step is a chain of known tokens with a draft tree below its last one. A part of a prompt is a chain
    without a tree, and plain decoding a chain of one token without a tree.

    Args:
        requests: makes the requests of commands.

    Attributes:
        ranks: this rank of the engine among all, which do the same. The first tells the others what it does.
        adapters: LoRA adapters of target and draft model.
        searches: beam searches that have not ended.
        ring: keeps some of the requests that end; None to keep none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        kernels: KernelSet,
        config: EngineConfig,
        requests: RequestMaker,
    ) -> None:
        self.scheduler, self.executor, self.kernels, self.requests = scheduler, executor, kernels, requests
        self.logprobs_mode = config.logprobs_mode
        # Whether other engines go on with this one's prompts; see `is_sending`.
        self._hands_over = config.is_prefill
        self.ranks = executor.ranks
        self.adapters = EngineAdapters(config, executor, kernels)
        self.searches = BeamSearches(scheduler)
        self.ring: RequestRing | None = None
        self._groups: WeakValueDictionary[str, RequestGroup] = WeakValueDictionary()
        self._observer = StepObserver(scheduler, executor.worker.device)
        self._scope = StepScope(executor.worker.device, kernels.limited_threads())
        # Of the last plan, and what the coming step learns from.
        self._check = 0
        self._measured: tuple[float, float] | None = None

    @property
    def worker(self) -> Worker:
        """The worker of this process, with its model, cache and drafter."""
        return self.executor.worker

    @property
    def works_beside(self) -> bool:
        """True on a GPU, which computes a step while the host does other work; see `run`."""
        return self.worker.device.type == "cuda"

    @property
    def connector(self) -> KVConnector | None:
        """Connector that loads and stores blocks beyond the cache; None without one."""
        return self.scheduler.connector

    @overload
    def handle(self, command: Add) -> RequestGroup: ...

    @overload
    def handle(self, command: Search) -> list[BeamSearch]: ...

    @overload
    def handle(self, command: Control | Close | EndSearches) -> EngineReply: ...

    def handle(
        self, command: AnyCommand | Search | EndSearches | Close
    ) -> EngineReply | RequestGroup | list[BeamSearch]:
        """Carry out a command between two steps, on all ranks.

        Returns:
            The reply; the requests of an `Add`, which are queued; the searches of a `Search`.

        Raises:
            ValueError, QueueFullError: it cannot be carried out; nothing has changed.
        """
        with self.ranks.together(*REFUSALS):
            if not isinstance(command, GetStats | CheckIntegrity):
                # Requests are given up even if another rank is gone.
                ends = isinstance(command, Abort | Stop | EndSearches | Close)
                with suppress(RankDeadError) if ends else nullcontext():
                    self.ranks.tell(command)
            return self.act(command)

    def act(self, command: AnyCommand | Told) -> EngineReply | RequestGroup | list[BeamSearch]:
        """Carry out a command on this rank; see `handle`."""
        match command:
            case RunStep():
                with self.ranks.together():
                    if (plan := self._plan(command)).rows:
                        self.run(plan)
            case Add():
                return self._add(command)
            case Search(adds, params):
                return self._search(adds, params)
            case EndSearches(numbers):
                self.searches.end(numbers)
            case Close():
                self._close()
            case Abort(request_id):
                if group := self._groups.get(request_id):
                    self._abort_group(group)
            case UpdateDraft(folder):
                self._update_draft(Path(folder))
            case LoadAdapter(adapter):
                self.adapters.load(adapter)
            case UnloadAdapter(lora_int_id):
                return Unloaded(self.adapters.unload(lora_int_id))
            case GetStats():
                return Stats(replace(self.scheduler.stats(), sources=self.requests.source_counts()))
            case CheckIntegrity():
                return self._integrity()
            case Stop():
                for group in list(self._groups.values()):
                    self._abort_group(group)
            case _:
                raise TypeError(f"no command of an engine: {command!r:.60}")
        return Done()

    def new_group(self, add: Add) -> RequestGroup:
        """Make the requests of a prompt, one per sample, on this rank alone. They are not queued yet; see `handle`."""
        adapter = None if add.adapter is None else self.adapters.load(add.adapter)
        group = self.requests.group(add, adapter)
        self._groups[group.request_id] = group
        return group

    def _add(self, add: Add) -> RequestGroup:
        group = self.new_group(add)
        try:
            for request in group.requests:
                self.scheduler.add(request)
        except BaseException:
            self._abort_group(group)
            raise
        return group

    def _search(self, adds: Sequence[Add], params: BeamSearchParams) -> list[BeamSearch]:
        roots = [BeamRequest.of(self.new_group(add).requests[0]) for add in adds]
        for root in roots:
            if isinstance(refusal := self.scheduler.refusal(root), ValueError):
                raise refusal
        return [self.searches.add(params, root) for root in roots]

    def _abort_group(self, group: RequestGroup) -> None:
        for request in group.requests:
            self.scheduler.abort(request)

    def _integrity(self) -> Integrity:
        problem = None
        try:
            check_scheduler(self.scheduler)
        except AssertionError as error:
            problem = one_line(error)
        pool = self.scheduler.manager.pool
        return Integrity(problem, sum(1 for _ in self.scheduler.queues), pool.num_blocks - pool.num_free)

    @property
    def has_unfinished(self) -> bool:
        return next(iter(self.scheduler.queues), None) is not None

    def step(self) -> list[Request]:
        """Run one forward pass of the target; return the requests that got tokens."""
        with self.ranks.together():
            plan = self.plan()
            if plan.rows:
                return self.run(plan)
        self.wait_for_kv()
        return []

    def plan(self) -> StepPlan:
        """Plan the coming step, without rows if nothing can run; else `run` must follow."""
        return self._plan(self.ranks.decide(lambda: RunStep(time.monotonic(), self._observer.measured, self._check)))

    def _plan(self, step: RunStep) -> StepPlan:
        if step.check != self._check:
            raise RuntimeError("ranks have planned different steps, which is a fault of the engine: report it")
        self._measured = step.measured
        self.searches.begin()
        plan = self.scheduler.schedule(step.clock)
        if self.ranks.layout.size > 1:
            self._check = plan.checksum()
        if not plan.rows:
            self.searches.go_on(is_stuck=not self.scheduler.queues.waiting_for_kv)
        return plan

    def wait_for_kv(self) -> None:
        """Wait a moment for blocks that a connector fetches or sends. Called where no request can run before."""
        if self.connector is not None and (self._hands_over or self.scheduler.queues.waiting_for_kv):
            self.connector.wait(KV_WAIT)

    def _update_draft(self, folder: Path) -> None:
        """Replace the draft head.

        Running requests keep their cache. Features and entries of their known tokens stay the old head's, which changes
        drafts and no output. Later requests do not find them by their prefix; see `RequestMaker.draft_identity`.

        Raises:
            ValueError: the folder holds no head of the present one's shape; the present one goes on.
        """
        self.ranks.decide(self.adapters.check_draft)
        rank_values = self.ranks.decide(lambda: read_values(folder))
        with on_device(self.worker.device), self.kernels.limited_threads():
            self.executor.update_draft(folder)
        self.scheduler.begin_with_draft(rank_values)
        for request in self.scheduler.queues:
            request.publishes = False
        self.requests.draft_identity = identity({"head": checkpoint_identity(folder)})
        logger.info("drafts: the head of %s", shown_path(folder))

    def is_sending(self, request: Request) -> bool:
        """Return whether a finished request's answer must wait, as another engine would not find its blocks yet."""
        return self._hands_over and self.connector is not None and self.connector.is_sending(request)

    def shutdown(self) -> None:
        """Store what a connector has still to store, and end other ranks. Nothing is run afterwards."""
        self.handle(Close())
        if self.ring is not None:
            self.ring.close()
        self.ranks.close()

    def _close(self) -> None:
        if self.connector is not None:
            self.connector.shutdown()
            # Others may take longer.
            with suppress(RankDeadError):
                self.ranks.share(None)

    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> list[Request]:
        """Run a step that the scheduler planned; return the requests that got tokens.

        If it raises, its requests stay as they were, but for those that it has ended. If it raises before all blocks
        have been moved, all requests that hold blocks end with an error; see `StepPlan.lost`.

        Args:
            meanwhile: called after the launch; a GPU computes the step in that time, a CPU has computed it.
        """
        with self.ranks.together(), self._scope:
            try:
                updated = self._run(plan, meanwhile)
            except BaseException as error:
                self.scheduler.cancel(plan)
                if plan.moves:
                    plan.lost = self._fail_holders(error)
                raise
        self.searches.go_on(is_stuck=False)
        return updated

    def _fail_holders(self, error: BaseException) -> list[Request]:
        """End all requests that hold blocks, whose content may be lost, and return them."""
        holders = [one for one in self.scheduler.queues if one.block_table]
        message = f"a step failed while cache blocks were moved: {one_line(error)}; send it again"
        for request in holders:
            self.scheduler.fail(request, message)
        self.searches.go_on(is_stuck=False)
        return holders

    def _run(self, plan: StepPlan, meanwhile: Callable[[], None] | None) -> list[Request]:
        observer, rows = self._observer, plan.rows
        observer.begin()
        # Rows of one adapter side by side, so that they are multiplied together.
        rows.sort(key=_adapter_place)
        order = self._order(plan)
        self.executor.step(order)
        if meanwhile is not None:
            meanwhile()
        observer.use_wait(self._measured)
        outcome = self.executor.collect()
        results = row_results(rows, order, outcome, self.logprobs_mode, self.kernels)
        self.executor.tell_outcome(outcome)
        updated = self._append(rows, outcome.trees, results)
        self.scheduler.update(plan, results)
        if self.ring is not None:
            for request in updated:
                self.ring.keep(request)
        if self.connector is not None:
            self.connector.wait_for_save(self.connector.build_connector_meta(self.scheduler.manager.take_published()))
        observer.end(rows, order.drafts, results, outcome.drafting)
        return updated

    def _order(self, plan: StepPlan) -> StepOrder:
        rows, followed = plan.rows, set(map(id, plan.followed))
        return StepOrder(
            parts=[_tree_row(row) for row in rows],
            drafts=[self._draft_row(row) for row in rows],
            chains=[row.fixed_nodes for row in rows],
            sampled=[place for place, row in enumerate(rows) if row.sampled],
            moves=plan.moves,
            needs_logits=any(row.choices is not None or row.request.needs_logits for row in rows),
            is_launched=plan.is_launched,
            followed=[place for place, row in enumerate(rows) if id(row.request) in followed],
        )

    def _draft_row(self, row: PlannedRow) -> DraftRow:
        request, table, is_followed = row.request, row.request.block_table, False
        if row.num_nodes:
            # All trees of a batch have as many levels as its deepest; nodes beyond this row's bounds need slots too.
            lacking = self.scheduler.blocks_with_drafts(request) - len(table)
            table = table.padded(lacking, self.scheduler.manager.null_block) if lacking > 0 else table
            is_followed = self.scheduler.draft_budget.follows and lacking <= 0
        adapter = request.adapter
        return DraftRow(
            table,
            request.num_draft_cached,
            row.draft_prefill_end,
            row.num_nodes,
            row.max_depth,
            request.context,
            adapter=0 if adapter is None else adapter.draft_place,
            draft_start=request.draft_start,
            is_followed=is_followed,
        )

    def _append(
        self, rows: Sequence[PlannedRow], trees: Sequence[DraftTree], results: Sequence[RowResult]
    ) -> list[Request]:
        """Give requests their tokens, one by one up to where the output ends.

        Returns:
            The requests that were sampled, and those whose last choices were scored.
        """
        updated = [row.request for row in rows if row.choices is not None and row.request.finished]
        for place, (row, result) in enumerate(zip(rows, results, strict=True)):
            request = row.request
            # A request may have been aborted during the step.
            if not row.sampled or result.needs_retry or request.finished:
                continue
            result.num_new = request.take(result.tokens, len(result.path), result.num_nodes)
            result.num_accepted = min(len(result.path), result.num_new)
            if row.chains is not None:
                row.chains.learn(result.tokens[: result.num_new])
            if request.is_traced:
                seconds = self._observer.seconds
                plain = time_without_drafts(rows, trees, self.scheduler.step_cost, seconds)
                trace = trace_of(request, trees[place], result, seconds, plain)
                request.steps[-1] = request.steps[-1]._replace(trace=trace)
            if result.is_dead_end and not request.finished:
                _end_without_token(request)
            updated.append(request)
        return updated


def _end_without_token(request: Request) -> None:
    """End a request that no token can follow: well where its grammar is complete, else with an error."""
    grammar = request.sampling.grammar
    if grammar is not None and grammar.is_complete(request.token_ids):
        request.end()
        return
    if grammar is not None and grammar.error is not None:
        request.fail(f"structured_outputs has become too complex: {grammar.error}; make it simpler")
        return
    request.fail(
        "no token can follow: the model's logits are not finite, or structured_outputs, allowed_token_ids, bad_words "
        "and min_tokens together forbid every token"
    )


def _tree_row(row: PlannedRow) -> TreeRow:
    request, adapter = row.request, row.request.adapter
    scores_prompt = request.params.prompt_logprobs is not None and request.num_cached < request.num_prompt
    scores_last = row.sampled or row.choices is not None
    return TreeRow(
        tokens=request.token_ids[request.num_cached : request.num_cached + row.num_known],
        num_cached=request.num_cached,
        block_table=request.block_table,
        num_scored=row.num_known if scores_prompt else int(scores_last),
        adapter=0 if adapter is None else adapter.target_place,
    )


def _adapter_place(row: PlannedRow) -> int:
    """Return the place of a row's adapter in the banks, 0 for none."""
    adapter = row.request.adapter
    return 0 if adapter is None else adapter.place
