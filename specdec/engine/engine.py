"""The step: schedule, draft, one forward pass, verify, commit."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.cache.kv_cache import KVCache
from specdec.core.device import on_device
from specdec.core.logprobs import score_output, score_prompt
from specdec.core.outputs import LogprobsMode
from specdec.core.request import Request
from specdec.draft_heads.drafting.drafter import Drafter, DraftRow
from specdec.execution.model_runner import ModelRunner
from specdec.execution.stopwatch import Stopwatch
from specdec.scheduling.plan import Plan, PlannedRow
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.tree_sizer import TreeOutcome
from specdec.verify.sampler import NO_TOKEN
from specdec.verify.tree import DraftTree
from specdec.verify.tree_batch import TreeRow, slots_of
from specdec.verify.verifier import Acceptance, SampledRow, Verifier


class LLMEngine:
    """Runs requests to their end, many at a time, by repeated steps.

    Every row of a step is a chain of known tokens with a draft tree under its last one: a part of a prompt
    is a chain without a tree, plain decoding a chain of one token without a tree.
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
        self._stopwatch = Stopwatch(cache.target.device)
        self._lesson: Callable[[], None] | None = None
        # Whether the device may still be busy with a step that nobody has waited for.
        self._is_behind = False

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run.
            QueueFullError: too many wait.
        """
        self.scheduler.add(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def abort(self, request: Request) -> None:
        """End a request at any moment; what it has produced stays, what the running step yields for it does not."""
        self.scheduler.abort(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One forward pass of the target; the requests that got tokens."""
        plan = self.scheduler.schedule()
        if not plan.rows:
            return []
        try:
            with on_device(self.cache.target.device):
                return self._run(plan)
        except BaseException:
            self.scheduler.cancel(plan)
            raise

    def _run(self, plan: Plan) -> list[Request]:
        began = time.perf_counter()
        self.cache.apply_moves(plan.moves)
        rows = plan.rows
        draft_rows = [self._draft_row(row) for row in rows]
        drafting = self._stopwatch.mark()
        trees = self.drafter.propose(draft_rows)
        drafted = self._stopwatch.mark()
        parts = [_tree_row(row, tree) for row, tree in zip(rows, trees, strict=True)]
        logits = self.runner.forward(parts)
        # A GPU is busy with the pass by now.
        self._catch_up()
        per_row = self._verify(rows, trees, parts, logits)
        done = [_Done(*row) for row in zip(rows, trees, per_row, strict=True)]
        for one in done:
            one.row.request.drafts = not one.needs_retry_without_drafts
        kept = [one for one in done if not one.needs_retry_without_drafts and not one.row.request.finished]
        self._commit(kept)
        accepted = {one.row.request: self._append(one) for one in kept}
        self.scheduler.update(plan, [accepted.get(row.request) for row in rows])
        is_behind = self._stopwatch.runs_behind and not any(row.sampled for row in rows)
        # What is not waited for is not measured, and neither is the step that waits for it as well.
        if not (is_behind or self._is_behind):
            seconds, draft_seconds = time.perf_counter() - began, self._stopwatch.seconds(drafting, drafted)
            self._lesson = partial(self._learn, done, draft_rows, seconds - draft_seconds, draft_seconds)
        self._is_behind = is_behind
        return [one.row.request for one in kept if one.acceptance is not None]

    def _catch_up(self) -> None:
        """What nobody waits for: the figures of the step before, its text, and what the next one will ask."""
        if self._lesson is not None:
            self._lesson()
            self._lesson = None
        self.scheduler.look_ahead()
        for request in self.scheduler.running:
            request.detokenizer.settle()

    def _learn(
        self, done: "list[_Done]", draft_rows: Sequence[DraftRow], pass_seconds: float, draft_seconds: float
    ) -> None:
        """Correct what is held to be known of a step's costs and of trees."""
        cost, drafts = self.scheduler.step_cost, self.scheduler.drafts
        if cost is None:
            return
        singles = [one for one in done if one.row.num_known == 1]
        tokens = sum(1 + len(one.tree) for one in singles)
        prompts = sum(one.row.num_known for one in done if one.row.num_known > 1)
        asked = [row for row in draft_rows if row.num_nodes]
        levels = max((row.max_depth for row in asked), default=0)
        read = sum(
            row.draft_prefill_end - row.num_draft_cached
            for row in draft_rows
            if row.draft_prefill_end > row.num_draft_cached
        )
        cost.correct(len(singles), tokens, prompts, pass_seconds, len(asked), levels, read, draft_seconds)
        if drafts is not None and drafts.worth is not None:
            outcomes = [one.outcome for one in done if len(one.tree) and one.acceptance is not None]
            if outcomes:
                drafts.worth.learn(outcomes)

    def _draft_row(self, row: PlannedRow) -> DraftRow:
        request, table = row.request, row.request.block_table
        drafts = self.scheduler.drafts
        if row.num_nodes and drafts is not None:
            # Places for drafts that the row's bounds do not reach: the levels of a batch are as deep as its deepest.
            lacking = drafts.blocks(request, self.scheduler.manager) - len(table)
            table = [*table, *[self.cache.null_block] * lacking]
        return DraftRow(
            table, request.num_draft_cached, row.draft_prefill_end, row.num_nodes, row.max_depth, request.context
        )

    def _verify(
        self, plan: list[PlannedRow], trees: list[DraftTree], parts: list[TreeRow], logits: Tensor
    ) -> list[Acceptance | None]:
        """Acceptances of the sampled rows; notes the log-probabilities that requests ask for."""
        rows = [SampledRow(tree, row.request.context) for row, tree in zip(plan, trees, strict=True) if row.sampled]
        ends = list(itertools.accumulate(part.num_scored + len(part.tree) for part in parts))
        spans = [
            slice(end - 1 - len(part.tree), end)
            for row, part, end in zip(plan, parts, ends, strict=True)
            if row.sampled
        ]
        wanted = logits
        if sum(span.stop - span.start for span in spans) < len(logits):
            wanted = torch.cat([logits[span] for span in spans] or [logits[:0]])
        found = iter(zip(self.verifier.verify(rows, wanted) if rows else (), spans, strict=True))
        acceptances: list[Acceptance | None] = []
        for row, tree, part, end in zip(plan, trees, parts, ends, strict=True):
            request = row.request
            if part.num_scored > 1 or (part.num_scored and not row.sampled):
                start = end - len(part.tree) - part.num_scored
                score_prompt(request, logits[start : start + part.num_scored])
            if not row.sampled:
                acceptances.append(None)
                continue
            acceptance, span = next(found)
            acceptances.append(acceptance)
            if request.params.logprobs is not None:
                score_output(request, acceptance, tree, logits[span], self.logprobs_mode, self.cache.kernels)
        return acceptances

    def _commit(self, done: "list[_Done]") -> None:
        """Move what the target has written for accepted nodes behind their chain."""
        source: list[int] = []
        target: list[int] = []
        for row, _, acceptance in done:
            path = acceptance.path if acceptance else ()
            if path != tuple(range(len(path))):
                request, end = row.request, row.request.num_cached + row.num_known
                slots = slots_of(request.block_table, end, end + path[-1] + 1, self.cache.block_size)
                source += [slots[node] for node in path]
                target += slots[: len(path)]
        if source:
            self.cache.move(source, target)

    def _append(self, done: "_Done") -> int:
        """Append the new tokens one by one, up to where the output ends; how many of them were drafts."""
        row, tree, acceptance = done
        request = row.request
        request.num_draft_cached = max(request.num_draft_cached, row.draft_prefill_end)
        if acceptance is None:
            return 0
        path, before, tokens = acceptance.path, request.num_output, tree.tokens
        for token, accepted in [*((tokens[node], True) for node in path), (acceptance.next_token, False)]:
            if token == NO_TOKEN:
                request.fail(
                    "no token can follow: the model's logits are not finite, or allowed_token_ids, bad_words "
                    "and min_tokens together forbid every token"
                )
            else:
                request.append(token, accepted)
            if request.finished:
                break
        new = request.num_output - before
        if before > 0:
            request.stats.count(len(path), new, len(tree))
        self.scheduler.counts.generated_tokens += new
        self.scheduler.counts.drafts_verified += len(tree)
        return min(len(path), new)


class _Done(NamedTuple):
    """A row of a step after its forward pass."""

    row: PlannedRow
    tree: DraftTree
    acceptance: Acceptance | None

    @property
    def needs_retry_without_drafts(self) -> bool:
        """Whether its result is to be thrown away and the step done again without drafts.

        Values of a draft node that overflow reach every row that reads them under a mask, and a plain step would
        not have met them.
        """
        return len(self.tree) > 0 and self.acceptance == Acceptance((), NO_TOKEN)

    @property
    def outcome(self) -> TreeOutcome:
        """How the tree has fared."""
        path, ranks = self.acceptance.path if self.acceptance else (), self.tree.ranks
        accepted = [ranks[node] for node in path] if ranks else path
        return TreeOutcome(len(self.tree), accepted, self.row.request.acceptance_history)


def _tree_row(row: PlannedRow, tree: DraftTree) -> TreeRow:
    request = row.request
    scores_prompt = request.params.prompt_logprobs is not None and request.num_cached < request.num_prompt
    return TreeRow(
        tokens=request.token_ids[request.num_cached : request.num_cached + row.num_known],
        tree=tree,
        num_cached=request.num_cached,
        block_table=request.block_table,
        num_scored=row.num_known if scores_prompt else int(row.sampled),
    )
