"""A request: its tokens, how far its cache has come, and where its output ends."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from specdec.detokenizer import Detokenizer
from specdec.logprobs import Logprob, top_logprobs
from specdec.outputs import CompletionOutput, SpeculationStats
from specdec.sampling_params import SamplingParams
from specdec.verify.sampling import Context, Sampling
from specdec.verify.transforms import NodeRows, processed_logits
from specdec.verify.tree import DraftTree
from specdec.verify.verifier import Acceptance

# Of the model's own distribution, or of the one that is sampled from.
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


@dataclass(eq=False)
class Request:
    """The only mutable object of the domain. `num_cached < len(token_ids)` while it lives.

    Attributes:
        token_ids: prompt and output.
        num_prompt: tokens of the prompt.
        max_length: most tokens it may come to, prompt included.
        sampling: how it samples.
        end_tokens: tokens after which the output ends.
        num_cached: tokens whose keys and values are in the cache.
        block_table: cache blocks, in order.
        accepted: per output token, whether a draft had it.
        drafts: whether its next step may carry drafts.
        error: why it failed, where `finish_reason` is "error".
        logprobs: per output token, where asked for; may run ahead of the output within a step.
        prompt_logprobs: per prompt token scored so far, None for the first.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    sampling: Sampling
    max_length: int
    end_tokens: frozenset[int]
    detokenizer: Detokenizer
    num_cached: int = 0
    block_table: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    drafts: bool = True
    error: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @cached_property
    def context(self) -> Context:
        """What sampling sees; grows with `token_ids`."""
        return Context(self.sampling, self.token_ids, self.num_prompt)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_length - len(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token: int, accepted: bool) -> None:
        """Take one generated token and see whether the output ends with it."""
        assert not self.finished, "a finished request takes no token"
        self.token_ids.append(token)
        self.accepted.append(accepted)
        if token in self.end_tokens:
            self.finish_reason = "stop"
            self.stop_reason = token if token in (self.params.stop_token_ids or ()) else None
            if self.params.include_stop_str_in_output:
                self.detokenizer.push(token, accepted, may_stop=False)
        elif self.detokenizer.push(token, accepted, may_stop=self.num_output > self.params.min_tokens):
            self.finish_reason, self.stop_reason = "stop", self.detokenizer.matched
        elif self.num_remaining == 0:
            self.finish_reason = "length"
        if self.finished:
            del self.logprobs[self.num_output :]

    def fail(self, message: str) -> None:
        """End without another token; the other requests of the step go on."""
        self.finish_reason, self.error = "error", message
        del self.logprobs[self.num_output :]

    def score_prompt(self, logits: Tensor) -> None:
        """Note the log-probabilities of prompt tokens that the rows `[rows, vocab]` after the cached ones predict."""
        assert self.params.prompt_logprobs is not None
        tokens = self.token_ids[self.num_cached + 1 : min(self.num_cached + 1 + len(logits), self.num_prompt)]
        if tokens:
            log_probs = _log_softmax(logits[: len(tokens)])
            self.prompt_logprobs += self._named(top_logprobs(log_probs, tokens, self.params.prompt_logprobs))

    def score_output(self, acceptance: Acceptance, tree: DraftTree, logits: Tensor, mode: LogprobsMode) -> None:
        """Note the log-probabilities of a step's tokens.

        Args:
            logits: `[1 + nodes, vocab]` of the root and the tree's nodes.
        """
        assert self.params.logprobs is not None
        tokens = [*(tree.tokens[node] for node in acceptance.path), acceptance.next_token]
        rows = torch.tensor([0, *(1 + node for node in acceptance.path)], device=logits.device)
        scores = logits[rows]
        if mode == "processed_logprobs":
            paths = torch.from_numpy(tree.path_tokens)[rows.cpu()]
            scores = processed_logits(scores, [NodeRows(self.context, len(rows), lambda: paths)])
        if tokens[-1] < 0:
            tokens, scores = tokens[:-1], scores[:-1]
        self.logprobs += self._named(top_logprobs(_log_softmax(scores), tokens, self.params.logprobs))

    def _named(self, rows: list[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        """With each token's text."""
        name = self.detokenizer.token_text
        return [{token: entry._replace(decoded_token=name(token)) for token, entry in row.items()} for row in rows]

    def completion(self) -> CompletionOutput:
        """A snapshot, with the text that is new since the last one."""
        segments = self.detokenizer.segments(final=self.finished)
        tokens = self.token_ids[self.num_prompt :]
        logprobs = None if self.params.logprobs is None else self.logprobs[: len(tokens)]
        return CompletionOutput(
            index=self.sampling.sample_index,
            text=self.detokenizer.text,
            token_ids=tokens,
            accepted=list(self.accepted),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            logprobs=logprobs,
            cumulative_logprob=None
            if logprobs is None
            else sum(entries[token].logprob for entries, token in zip(logprobs, tokens, strict=True)),
            stats=replace(self.stats, accepted_per_depth=list(self.stats.accepted_per_depth)),
            segments=segments,
        )


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
