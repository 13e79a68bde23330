"""The step: schedule, draft, one forward pass, verify, commit."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import overload
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from specdec.config import EngineConfig
from specdec.core.commands import (
    Abort,
    Add,
    AnyCommand,
    CheckIntegrity,
    Control,
    Done,
    EngineReply,
    GetStats,
    Integrity,
    LoadAdapter,
    Stats,
    Stop,
    UnloadAdapter,
    Unloaded,
    UpdateDraft,
    one_line,
)
from specdec.core.device import on_device
from specdec.core.logprobs import choice_logprobs, score_output, score_prompt
from specdec.core.request import Request, RequestGroup
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.engine.adapters import EngineAdapters
from specdec.engine.request_maker import RequestMaker
from specdec.engine.request_ring import RequestRing
from specdec.engine.step_observer import StepObserver
from specdec.engine.tree_trace import node_probs, time_without_drafts, trace_of
from specdec.execution.executor import Executor
from specdec.execution.step_order import StepOrder, StepOutcome
from specdec.execution.worker import Worker, score_spans
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.kernels.types.types import NO_TOKEN, Acceptance
from specdec.kv_transfer.cache_identity import checkpoint_identity, identity
from specdec.kv_transfer.kv_connector import KVConnector
from specdec.models.hub import shown_path
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
        requests: makes the requests of commands; None for an engine that is given none.

    Attributes:
        adapters: LoRA adapters of target and draft model.
        ring: keeps some of the requests that end; None to keep none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        kernels: KernelSet,
        config: EngineConfig,
        requests: RequestMaker | None = None,
    ) -> None:
        self.scheduler, self.executor, self.kernels, self.requests = scheduler, executor, kernels, requests
        self.logprobs_mode = config.logprobs_mode
        # Whether other engines go on with this one's prompts; see `is_sending`.
        self._hands_over = config.is_prefill
        self.adapters = EngineAdapters(config, executor, kernels)
        self.ring: RequestRing | None = None
        self._groups: WeakValueDictionary[str, RequestGroup] = WeakValueDictionary()
        self._null_block = scheduler.manager.pool.num_blocks
        self._observer = StepObserver(scheduler, executor.worker.device)

    @property
    def worker(self) -> Worker:
        """The worker of this process, with its model, cache and drafter."""
        return self.executor.worker

    @property
    def connector(self) -> KVConnector | None:
        """Connector that loads and stores blocks beyond the cache; None without one."""
        return self.scheduler.connector

    @overload
    def handle(self, command: Add) -> RequestGroup: ...

    @overload
    def handle(self, command: Control) -> EngineReply: ...

    def handle(self, command: AnyCommand) -> EngineReply | RequestGroup:
        """Carry out a command between two steps.

        Returns:
            The reply; the requests of an `Add`, which are queued.

        Raises:
            ValueError, QueueFullError: it cannot be carried out; nothing has changed.
        """
        match command:
            case Add():
                return self._add(command)
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
                return Stats(self.scheduler.stats())
            case CheckIntegrity():
                return self._integrity()
            case Stop():
                for group in list(self._groups.values()):
                    self._abort_group(group)
            case _:
                raise TypeError(f"no command of an engine: {command!r:.60}")
        return Done()

    def new_group(self, add: Add) -> RequestGroup:
        """Make the requests of a prompt, one per sample, which are not queued yet; see `handle`."""
        assert self.requests is not None
        adapter = None if add.adapter is None else self.adapters.load(add.adapter)
        group = self.requests.group(add, adapter)
        self._groups[group.request_id] = group
        return group

    def _add(self, add: Add) -> RequestGroup:
        group = self.new_group(add)
        queued: list[Request] = []
        try:
            for request in group.requests:
                self.add_request(request)
                queued.append(request)
        except BaseException:
            for request in queued:
                self.abort(request)
            raise
        return group

    def _abort_group(self, group: RequestGroup) -> None:
        for request in group.requests:
            self.abort(request)

    def _integrity(self) -> Integrity:
        problem = None
        try:
            check_scheduler(self.scheduler)
        except AssertionError as error:
            problem = one_line(error)
        pools = (self.scheduler.manager.pool, self.scheduler.manager.host)
        blocks = sum(pool.num_blocks - pool.num_free for pool in pools)
        return Integrity(problem, sum(1 for _ in self.scheduler.queues), blocks)

    def add_request(self, request: Request) -> None:
        """Queue a request; see `Scheduler.add`."""
        self.scheduler.add(request)

    @property
    def has_unfinished(self) -> bool:
        return next(iter(self.scheduler.queues), None) is not None

    def abort(self, request: Request) -> None:
        """End a request at any moment. It keeps its output, without what the running step yields for it."""
        self.scheduler.abort(request)

    def step(self) -> list[Request]:
        """Run one forward pass of the target; return the requests that got tokens."""
        plan = self.scheduler.schedule()
        if plan.rows:
            return self.run(plan)
        self.wait_for_kv()
        return []

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
        self.adapters.check_draft()
        rank_values = read_values(folder)
        with on_device(self.worker.device), self.kernels.limited_threads():
            self.executor.update_draft(folder)
        self.scheduler.begin_with_draft(rank_values)
        assert self.requests is not None
        self.requests.draft_identity = identity({"head": checkpoint_identity(folder)})
        logger.info("drafts: the head of %s", shown_path(folder))

    def is_sending(self, request: Request) -> bool:
        """Return whether a finished request's answer must wait, as another engine would not find its blocks yet."""
        return self._hands_over and self.connector is not None and self.connector.is_sending(request)

    def shutdown(self) -> None:
        """Store what a connector has still to store, and end workers in other processes. Nothing is run afterwards."""
        if self.connector is not None:
            self.connector.shutdown()
        if self.ring is not None:
            self.ring.close()
        self.executor.shutdown()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Request]:
        """Run a step that the scheduler planned; return the requests that got tokens.

        If it raises, its requests stay as they were, but for those that it has ended. `plan.moves` is empty if the
        blocks have been moved; otherwise blocks of requests outside the plan may lack their content.
        """
        with on_device(self.worker.device), self.kernels.limited_threads():
            try:
                return self._run(plan)
            except BaseException:
                self.scheduler.cancel(plan)
                raise

    def _run(self, plan: StepPlan) -> list[Request]:
        observer, rows = self._observer, plan.rows
        observer.begin()
        # Rows of one adapter side by side, so that they are multiplied together.
        rows.sort(key=_adapter_place)
        order = self._order(plan)
        if self.connector is not None:
            self.connector.start_save_kv(self.connector.build_layer_meta(self.scheduler.upcoming_blocks(plan)))
        self.executor.step(order)
        observer.use_wait()
        outcome = self.executor.collect()
        results = self._results(rows, order, outcome)
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
        rows = plan.rows
        return StepOrder(
            parts=[_tree_row(row) for row in rows],
            drafts=[self._draft_row(row) for row in rows],
            chains=[row.fixed_nodes for row in rows],
            sampled=[place for place, row in enumerate(rows) if row.sampled],
            moves=plan.moves,
            needs_logits=any(row.choices is not None or row.request.needs_logits for row in rows),
        )

    def _draft_row(self, row: PlannedRow) -> DraftRow:
        request, table = row.request, row.request.block_table
        if row.num_nodes:
            # All trees of a batch have as many levels as its deepest; nodes beyond this row's bounds need slots too.
            lacking = self.scheduler.blocks_with_drafts(request) - len(table)
            table = [*table, *[self._null_block] * lacking]
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
        )

    def _results(self, plan: list[PlannedRow], order: StepOrder, outcome: StepOutcome) -> list[RowResult]:
        """Return the rows' results, and store the log-probabilities that requests ask for."""
        trees, acceptances = outcome.trees, iter(outcome.acceptances)
        results = [
            _result(tree, next(acceptances)) if row.sampled else RowResult()
            for row, tree in zip(plan, trees, strict=True)
        ]
        if outcome.logits is not None:
            found = iter(outcome.acceptances)
            spans = score_spans(order, [len(tree) for tree in trees])
            for row, part, tree, span, result in zip(plan, order.parts, trees, spans, results, strict=True):
                if row.choices is not None:
                    if not row.request.finished:
                        row.request.take_scores(row.choices, choice_logprobs(row.choices, outcome.logits[span]))
                    continue
                acceptance = next(found) if row.sampled else None
                self._score(row.request, part, tree, outcome.logits[span], acceptance, result)
        return results

    def _score(
        self,
        request: Request,
        part: TreeRow,
        tree: DraftTree,
        logits: Tensor,
        acceptance: Acceptance | None,
        result: RowResult,
    ) -> None:
        """Store the log-probabilities and node probabilities that a request asks for."""
        if part.num_scored > 1 or (part.num_scored and acceptance is None):
            score_prompt(request, logits[: part.num_scored])
        if acceptance is None:
            return
        own = logits[len(logits) - 1 - len(tree) :]
        if request.is_traced:
            result.node_probs = node_probs(request, tree, own, self.kernels)
        if request.params.logprobs is not None:
            score_output(request, acceptance, tree, own, self.logprobs_mode, self.kernels)

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


def _result(tree: DraftTree, acceptance: Acceptance) -> RowResult:
    path, next_token = acceptance
    is_dead_end = next_token == NO_TOKEN
    tokens = [*(tree.tokens[node] for node in path), *([] if is_dead_end else [next_token])]
    return RowResult(
        num_nodes=len(tree),
        num_chained=tree.num_chained,
        path=path,
        ranks=[tree.ranks[node] for node in path] if tree.ranks else path,
        tokens=tokens,
        is_dead_end=is_dead_end,
        # Values of a draft node that overflow reach every row that reads them under a mask. A plain step would not
        # have met them.
        needs_retry=len(tree) > 0 and not tokens,
    )


def _end_without_token(request: Request) -> None:
    """End a request that no token can follow: well where its grammar is complete, else with an error."""
    grammar = request.sampling.grammar
    if grammar is not None and grammar.is_complete(request.token_ids):
        request.end()
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
