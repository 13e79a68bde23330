"""The step: schedule, draft, one forward pass, verify, commit."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.cache.kv_cache import KVCache
from specdec.core.device import on_device
from specdec.core.logprobs import score_output, score_prompt
from specdec.core.outputs import LogprobsMode
from specdec.core.request import Request
from specdec.draft_heads.drafting.chained_trees import add_chains
from specdec.draft_heads.drafting.drafter import Drafter, DraftRow
from specdec.draft_heads.drafting.structured_drafts import without_forbidden
from specdec.engine.step_observer import StepObserver
from specdec.engine.tree_trace import node_probs, trace_of
from specdec.execution.model_runner import ModelRunner
from specdec.kernels.draft_trees import DraftTrees
from specdec.kernels.tree import DraftTree, TreeRow
from specdec.kernels.types import NO_TOKEN, Acceptance
from specdec.kv_transfer.kv_connector import KVConnector
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.step_plan import PlannedRow, RowResult, StepPlan
from specdec.verify.tree_batch import slots_of
from specdec.verify.verifier import Verifier

# Seconds that an engine waits for blocks when it has nothing else to do.
KV_WAIT = 0.002


class LLMEngine:
    """Runs many requests at a time, step by step, to their end.

    Every row of a step is a chain of known tokens with a draft tree below its last one. A part of a prompt is a chain
    without a tree, and plain decoding a chain of one token without a tree.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        cache: KVCache,
        drafter: Drafter,
        verifier: Verifier,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        self.scheduler, self.runner, self.cache = scheduler, runner, cache
        self.drafter, self.verifier, self.logprobs_mode = drafter, verifier, logprobs_mode
        self._observer = StepObserver(scheduler, cache.target.device)

    @property
    def connector(self) -> KVConnector | None:
        """What loads and stores blocks beyond the cache."""
        return self.scheduler.connector

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
        """Wait a moment for blocks that a connector fetches, if requests wait for them. Called where none can run."""
        if self.connector is not None and self.scheduler.queues.waiting_for_kv:
            self.connector.wait(KV_WAIT)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Request]:
        """Run a step that the scheduler planned; return the requests that got tokens.

        If it raises, its requests stay as they were, but for those that it has ended. `plan.moves` is empty if the
        blocks have been moved; otherwise blocks of requests outside the plan may lack their content.
        """
        try:
            with on_device(self.cache.target.device), self.cache.kernels.limited_threads():
                return self._run(plan)
        except BaseException:
            self.scheduler.cancel(plan)
            raise

    def _run(self, plan: StepPlan) -> list[Request]:
        observer, rows = self._observer, plan.rows
        observer.begin()
        self.cache.apply_moves(plan.moves)
        plan.moves = []
        draft_rows = [self._draft_row(row) for row in rows]
        with observer.drafting():
            drafted = self.drafter.propose(draft_rows)
            chained = add_chains(drafted, [row.chain_nodes for row in rows], self.cache.target.device)
            trees = without_forbidden(chained, [row.context for row in draft_rows])
        parts = [_tree_row(row) for row in rows]
        logits = self.runner.forward(parts, trees)
        observer.use_wait()
        results = self._verify(rows, trees, parts, logits)
        self._commit(rows, results)
        updated = self._append(rows, trees, results)
        self.scheduler.update(plan, results)
        if self.connector is not None:
            self.connector.wait_for_save(self.connector.build_connector_meta(self.scheduler.manager.take_published()))
        observer.end(rows, draft_rows, results)
        return updated

    def _draft_row(self, row: PlannedRow) -> DraftRow:
        request, table = row.request, row.request.block_table
        if row.num_nodes:
            # All trees of a batch have as many levels as its deepest; nodes beyond this row's bounds need slots too.
            lacking = self.scheduler.blocks_with_drafts(request) - len(table)
            table = [*table, *[self.cache.null_block] * lacking]
        return DraftRow(
            table, request.num_draft_cached, row.draft_prefill_end, row.num_nodes, row.max_depth, request.context
        )

    def _verify(
        self, plan: list[PlannedRow], trees: DraftTrees, parts: list[TreeRow], logits: Tensor
    ) -> list[RowResult]:
        """Return the rows' results, and store the log-probabilities that requests ask for."""
        sampled = [i for i, row in enumerate(plan) if row.sampled]
        ends = list(itertools.accumulate(part.num_scored + size for part, size in zip(parts, trees.sizes, strict=True)))
        spans = [slice(ends[i] - 1 - trees.sizes[i], ends[i]) for i in sampled]
        wanted = logits
        if sum(span.stop - span.start for span in spans) < len(logits):
            wanted = torch.cat([logits[span] for span in spans] or [logits[:0]])
        verified: list[Acceptance] = []
        if sampled:
            own = trees if len(sampled) == len(plan) else trees.select(sampled)
            verified = self.verifier.verify(own, [plan[i].request.context for i in sampled], wanted)
        found = iter(zip(verified, spans, strict=True))
        results: list[RowResult] = []
        for row, tree, part, end in zip(plan, trees.read(), parts, ends, strict=True):
            request = row.request
            if part.num_scored > 1 or (part.num_scored and not row.sampled):
                start = end - len(tree) - part.num_scored
                score_prompt(request, logits[start : start + part.num_scored])
            if not row.sampled:
                results.append(RowResult())
                continue
            acceptance, span = next(found)
            result = _result(tree, acceptance)
            results.append(result)
            if request.is_traced:
                result.node_probs = node_probs(request, tree, logits[span], self.cache.kernels)
            if request.params.logprobs is not None:
                score_output(request, acceptance, tree, logits[span], self.logprobs_mode, self.cache.kernels)
        return results

    def _commit(self, rows: Sequence[PlannedRow], results: Sequence[RowResult]) -> None:
        """Move the cache entries of accepted nodes behind their chain."""
        source: list[int] = []
        target: list[int] = []
        for row, result in zip(rows, results, strict=True):
            path = result.path
            if path != tuple(range(len(path))) and not row.request.finished:
                request, end = row.request, row.request.num_cached + row.num_known
                slots = slots_of(request.block_table, end, end + path[-1] + 1, self.cache.block_size)
                source += [slots[node] for node in path]
                target += slots[: len(path)]
        if source:
            self.cache.move(source, target)

    def _append(self, rows: Sequence[PlannedRow], trees: DraftTrees, results: Sequence[RowResult]) -> list[Request]:
        """Give requests their tokens, one by one up to where the output ends; return the requests that were sampled."""
        updated = []
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
                trace = trace_of(request, trees.read()[place], result, self._observer.seconds)
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
    request = row.request
    scores_prompt = request.params.prompt_logprobs is not None and request.num_cached < request.num_prompt
    return TreeRow(
        tokens=request.token_ids[request.num_cached : request.num_cached + row.num_known],
        num_cached=request.num_cached,
        block_table=request.block_table,
        num_scored=row.num_known if scores_prompt else int(row.sampled),
    )
