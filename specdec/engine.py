"""The step: schedule, draft, one forward pass, verify, commit."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.draft_heads.drafter import Drafter, DraftRow
from specdec.kv_cache import KVCache
from specdec.model_runner import ModelRunner, StepOutput
from specdec.request import LogprobsMode, Request
from specdec.scheduler import PlannedRow, Scheduler
from specdec.verify.tree import DraftTree
from specdec.verify.tree_batch import TreeBatch, TreeRow, slots_of
from specdec.verify.verifier import NO_TOKEN, Acceptance, SampledRow, Verifier


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

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run.
        """
        self.scheduler.add(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def abort(self, request: Request) -> None:
        """End a request now, between steps; what it has produced stays."""
        if not request.finished:
            request.finish_reason = "abort"
            self._end(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One forward pass of the target; the requests that got tokens."""
        plan = self.scheduler.schedule()
        if not plan:
            return []
        trees = self.drafter.propose([_draft_row(row) for row in plan])
        parts = [_tree_row(row, tree) for row, tree in zip(plan, trees, strict=True)]
        batch = TreeBatch.pack(parts, self.cache.block_size, self.cache.target.device)
        output = self.runner.forward(batch)
        per_row = self._verify(plan, trees, parts, output.logits)
        done = [_Done(*row) for row in zip(plan, trees, batch.row_starts, per_row, strict=True)]
        for one in done:
            one.row.request.drafts = not one.is_spoilt
        done = [one for one in done if not one.is_spoilt]
        self._commit(done)
        self._observe(done, output)
        return self._update(done)

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
                request.score_prompt(logits[start : start + part.num_scored])
            if not row.sampled:
                acceptances.append(None)
                continue
            acceptance, span = next(found)
            acceptances.append(acceptance)
            if request.params.logprobs is not None:
                request.score_output(acceptance, tree, logits[span], self.logprobs_mode)
        return acceptances

    def _commit(self, done: "list[_Done]") -> None:
        """Move the accepted nodes' keys and values behind their chain; count what is cached."""
        source: list[int] = []
        target: list[int] = []
        for row, _, _, acceptance in done:
            request = row.request
            end = request.num_cached + row.num_known
            request.num_cached = end
            if acceptance is None:
                continue
            path = acceptance.path
            request.num_cached += len(path)
            if path != tuple(range(len(path))):
                slots = slots_of(request.block_table, end, end + path[-1] + 1, self.cache.block_size)
                source += [slots[node] for node in path]
                target += slots[: len(path)]
        if source:
            self.cache.move(source, target)

    def _observe(self, done: "list[_Done]", output: StepOutput) -> None:
        """Hand the drafter the features of the chain and of the accepted nodes."""
        for row, _, start, acceptance in done:
            chain = start + row.num_known
            path = acceptance.path if acceptance else ()
            features = output.features[start:chain]
            if path:
                rows = torch.tensor([*range(start, chain), *(chain + node for node in path)], device=features.device)
                features = output.features.index_select(0, rows)
            first = row.request.num_cached - row.num_known - len(path)
            self.drafter.observe(row.request.request_id, first, features)

    def _update(self, done: "list[_Done]") -> list[Request]:
        """Append the new tokens one by one, up to where the output ends."""
        changed = []
        for row, tree, _, acceptance in done:
            if acceptance is None:
                continue
            request, path = row.request, acceptance.path
            first = request.num_output == 0
            before = request.num_output
            for token, accepted in [*((tree.tokens[node], True) for node in path), (acceptance.next_token, False)]:
                if token == NO_TOKEN:
                    request.fail(
                        "no token can follow: the model's logits are not finite, or allowed_token_ids, bad_words "
                        "and min_tokens together forbid every token"
                    )
                else:
                    request.append(token, accepted)
                if request.finished:
                    break
            # Nothing behind the kept tokens counts as cached.
            request.num_cached = min(request.num_cached, len(request.token_ids))
            if not first:
                request.stats.count(len(path), request.num_output - before, len(tree))
            if request.finished:
                self._end(request)
            changed.append(request)
        return changed

    def _end(self, request: Request) -> None:
        self.scheduler.release(request)
        self.drafter.forget(request.request_id)


class _Done(NamedTuple):
    """A row of a step after its forward pass."""

    row: PlannedRow
    tree: DraftTree
    start: int
    acceptance: Acceptance | None

    @property
    def is_spoilt(self) -> bool:
        """Whether its result is to be thrown away and the step done again without drafts.

        Values of a draft node that overflow reach every row that reads them under a mask, and a plain step would
        not have met them.
        """
        return len(self.tree) > 0 and self.acceptance == Acceptance((), NO_TOKEN)


def _draft_row(row: PlannedRow) -> DraftRow:
    request = row.request
    return DraftRow(
        request_id=request.request_id,
        block_table=request.block_table,
        num_nodes=row.num_nodes,
        max_depth=row.max_depth,
        context=request.context,
    )


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
