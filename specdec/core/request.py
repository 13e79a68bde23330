"""A request: its tokens, its cache counters, and where its output ends. Pure Python."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from specdec.core.choices import Choices, ChoiceTree
from specdec.core.draftable_row import AcceptanceHistory, Ahead, DraftableRow
from specdec.core.lora_request import LoadedAdapter
from specdec.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SpeculationStats, Step
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.chains import ChainSource, ChainTree
from specdec.draft_heads.drafting.predicted_text import PredictedText
from specdec.draft_heads.drafting.stored_chains import StoredText
from specdec.kernels.types.block_table import BlockTable
from specdec.text.detokenizer import Detokenizer
from specdec.verify.sampling import Context, Sampling


@dataclass
class RequestTimes:
    """Times of a request's events, in seconds of the monotonic clock; 0 for an event that has not happened."""

    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def saw_token(self) -> None:
        """Note that tokens came."""
        self.last_token = time.monotonic()
        self.first_token = self.first_token or self.last_token


# A request is served before those of greater rank.
Rank = tuple[int, int, int]


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine.

    `num_cached < len(token_ids)` while it runs. They are equal only for a beam that waits for its search to choose the
    next token.

    Attributes:
        token_ids: prompt and output.
        num_prompt: tokens of the prompt.
        max_length: limit of its tokens, prompt included.
        sampling: sampling parameters.
        end_tokens: tokens after which the output ends.
        priority: lower numbers run first under the policy "priority".
        client: name of the client that sent it; clients are served by turns.
        cache_salt: only requests of the same salt share cached blocks.
        adapter: the target's adapter for it; None for the target alone.
        cached_samples: samples of the same prompt that hold cache blocks, longest-holding first; one dict for all
            samples, used as an ordered set.
        rank: its place among all requests, assigned when it is queued.
        num_cached: tokens whose keys and values are in the cache.
        num_draft_cached: tokens whose keys and values of the draft head are in the cache too.
        draft_start: first entry that the head's rows may see: earlier ones were never read, or have slid out.
        block_table: cache blocks, in order.
        num_slid: blocks at its beginning that were given back, as no layer reads them any more; the null block stands
            for them.
        block_hashes: hashes of its full blocks of known tokens, as far as they were needed.
        num_registered, num_marked: blocks that are published as full, and marked as read by the draft head.
        publishes: whether others may find its blocks; not once the head that made a part of them was replaced.
        accepted: per output token, whether it was a draft token.
        drafts_enabled: whether its next step may carry drafts.
        may_follow: whether the pass over its next token may be launched before the host knows that token.
        acceptance_history: acceptance of its recent drafts, those of chains not included.
        draftable: bounds of its trees while no chain and no length narrows them, computed with its first tree.
        chain_sources: what knows draft tokens without a pass of a model.
        prediction: the predicted text, which is one of them.
        stored: its own text in the store of texts, which is one of them.
        error: why it failed, if `finish_reason` is "error".
        logprobs: per output token, if asked for; may run ahead of the output within a step.
        prompt_logprobs: per prompt token scored so far, None for the first.
        choices: continuations of its prompt that it scores; None for a request that generates.
        least_nodes: nodes below its last token without which its next step gives nothing; 0 but for choices.
        steps: steps with a draft tree, in order; all steps if it is traced.
        is_traced: whether steps keep their trees.
        num_cached_prompt: prompt tokens that its first admission found in the prefix cache; None before.
        times: when it was queued, first planned, and got its first and last token; see `RequestMetrics`.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    sampling: Sampling
    max_length: int
    end_tokens: frozenset[int]
    detokenizer: Detokenizer
    priority: int = 0
    client: str = ""
    cache_salt: str | None = None
    adapter: LoadedAdapter | None = None
    cached_samples: "dict[Request, None]" = field(default_factory=dict, repr=False)
    rank: Rank = (0, 0, 0)
    num_cached: int = 0
    num_draft_cached: int = 0
    draft_start: int = 0
    block_table: BlockTable = field(default_factory=BlockTable)
    num_slid: int = 0
    block_hashes: list[bytes] = field(default_factory=list, repr=False)
    num_registered: int = 0
    num_marked: int = 0
    publishes: bool = True
    accepted: list[bool] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    drafts_enabled: bool = True
    may_follow: bool = True
    acceptance_history: AcceptanceHistory = field(default_factory=AcceptanceHistory)
    draftable: DraftableRow | None = field(default=None, repr=False)
    chain_sources: Sequence[ChainSource] = field(default=(), repr=False)
    prediction: PredictedText | None = field(default=None, repr=False)
    stored: StoredText | None = field(default=None, repr=False)
    error: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    choices: Choices | None = None
    least_nodes: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    steps: list[Step] = field(default_factory=list, repr=False)
    is_traced: bool = False
    num_cached_prompt: int | None = None
    times: RequestTimes = field(default_factory=RequestTimes, repr=False)
    _chains: tuple[int, ChainTree] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.adapter is not None:
            self.adapter.add_user(self)

    @cached_property
    def context(self) -> Context:
        """Sampling parameters and tokens, as sampling needs them; grows with `token_ids`."""
        return Context(self.sampling, self.token_ids, self.num_prompt)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncached_tokens(self) -> int:
        """Number of known tokens that are not cached yet."""
        return len(self.token_ids) - self.num_cached

    @property
    def num_remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self.max_length - len(self.token_ids)

    @property
    def may_draft(self) -> bool:
        """Return whether the next step may carry drafts. The first step cannot: its prompt has no root yet."""
        # Asked of every row in every step: a token that is generated, and two that may follow.
        has_room = self.num_prompt < len(self.token_ids) < self.max_length - 1
        return has_room and self.drafts_enabled and self.params.speculation.enabled

    def ahead(self) -> Ahead:
        """Return what the tree sizer asks of the request's future."""
        known = len(self.token_ids)
        return Ahead(known - self.num_draft_cached, self.max_length - known)

    def chains(self, depth: int) -> ChainTree | None:
        """Return the chains of all its sources for its next step, None if there are none.

        Args:
            depth: most tokens of a chain; the same in every call.
        """
        if not self.chain_sources:
            return None
        known = len(self.token_ids)
        if self._chains is None or self._chains[0] != known:
            depth = min(depth, self.num_remaining - 1)
            found = [chain for source in self.chain_sources for chain in source.chains(self.token_ids, depth)]
            self._chains = known, ChainTree(found)
        return self._chains[1] or None

    @property
    def needs_logits(self) -> bool:
        """True if it needs logits on the host: for log-probabilities or a trace."""
        return self.is_traced or self.params.logprobs is not None or self.params.prompt_logprobs is not None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, tokens: Sequence[int], num_accepted: int, num_drafted: int) -> int:
        """Append a step's tokens up to where the output ends, and count the step.

        Args:
            tokens: accepted drafts first.
            num_accepted: number of those.
            num_drafted: draft nodes that the target has verified.

        Returns:
            How many tokens the output has taken.
        """
        before = self.num_output
        for place, token in enumerate(tokens):
            self.append(token, place < num_accepted)
            if self.finished:
                break
        num_new = self.num_output - before
        self.times.saw_token()
        # The pass over the prompt can carry no draft.
        if before > 0:
            self.stats.count(num_accepted, num_new, num_drafted)
        if self.prediction is not None:
            self.prediction.follow(self.token_ids)
            self.stats.accepted_prediction = self.prediction.num_accepted
            self.stats.rejected_prediction = self.prediction.num_rejected
        if self.stored is not None:
            self.stored.follow(self.token_ids, self.num_cached_prompt or 0, ended=self.finished)
        if num_drafted or self.is_traced:
            self.steps.append(Step(num_drafted, min(num_accepted, num_new)))
        return num_new

    def append(self, token: int, accepted: bool) -> None:
        """Append one generated token and check whether the output ends with it."""
        assert not self.finished, "a finished request takes no token"
        self.token_ids.append(token)
        self.accepted.append(accepted)
        if token in self.end_tokens:
            self.finish_reason = "stop"
            self.stop_reason = token if token in (self.params.stop_token_ids or ()) else None
            if self.detokenizer.is_stop(token):
                if self.detokenizer.push(token, accepted):
                    self.stop_reason = self.detokenizer.matched
            elif self.params.include_stop_str_in_output:
                self.detokenizer.push(token, accepted, may_stop=False)
        elif self.detokenizer.push(token, accepted, may_stop=self.num_output > self.params.min_tokens):
            self.finish_reason, self.stop_reason = "stop", self.detokenizer.matched
        elif self.num_remaining == 0:
            self.finish_reason = "length"
        if self.finished:
            del self.logprobs[self.num_output :]

    def take_scores(self, tree: ChoiceTree, logprobs: Sequence[float]) -> None:
        """Keep the scores of a step's choices; end the request with the last of them.

        Args:
            logprobs: one for each of `tree.read`.
        """
        assert self.choices is not None
        if not all(map(math.isfinite, logprobs)):
            self.fail("the choices cannot be scored: the model's logits are not finite")
            return
        self.choices.record(tree, logprobs)
        self.least_nodes = self.choices.least_nodes
        if self.choices.is_complete:
            self.times.saw_token()
            self.end()

    def end(self) -> None:
        """End the request well, without another token."""
        self.finish_reason = "stop"
        del self.logprobs[self.num_output :]

    def fail(self, message: str) -> None:
        """End the request without another token. The other requests of the step go on."""
        self.finish_reason, self.error = "error", message
        del self.logprobs[self.num_output :]

    def completion(self) -> CompletionOutput:
        """Return a snapshot, with the text that is new since the last one."""
        segments = self.detokenizer.segments(final=self.finished)
        tokens = self.token_ids[self.num_prompt :]
        logprobs = None if self.params.logprobs is None else self.logprobs[: len(tokens)]
        total = None
        if logprobs is not None:
            total = sum(entries[token].logprob for entries, token in zip(logprobs, tokens, strict=True))
        return CompletionOutput(
            index=self.sampling.sample_index,
            text=self.detokenizer.text,
            token_ids=tokens,
            accepted=list(self.accepted),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            logprobs=logprobs,
            cumulative_logprob=total,
            stats=replace(self.stats, accepted_per_depth=list(self.stats.accepted_per_depth)),
            steps=list(self.steps),
            segments=segments,
        )


@dataclass(eq=False)
class RequestGroup:
    """A prompt and its `SamplingParams.n` requests.

    Attributes:
        prompt: text as given, None for token ids.
        prompt_token_ids: the prompt's tokens.
        arrival_time: when it was made, in seconds since 1970.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    requests: list[Request]
    arrival_time: float = field(default_factory=time.time)
    _num_finished: int = field(default=0, repr=False)

    @property
    def finished(self) -> bool:
        """Return whether all samples have ended."""
        # A sample that has ended is not looked at again, so that the calls of n steps take n looks and not n².
        while self._num_finished < len(self.requests) and self.requests[self._num_finished].finished:
            self._num_finished += 1
        return self._num_finished == len(self.requests)

    def output(self) -> RequestOutput:
        """Return a snapshot of all samples."""
        first = self.requests[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[request.completion() for request in self.requests],
            finished=self.finished,
            prompt_logprobs=None if first.params.prompt_logprobs is None else list(first.prompt_logprobs),
            num_cached_tokens=first.num_cached_prompt,
            metrics=self.metrics(),
            choices=first.choices.scores() if first.choices is not None and first.choices.is_complete else None,
            lora_request=None if first.adapter is None else first.adapter.request,
        )

    def metrics(self) -> RequestMetrics:
        """Return the times of the prompt and its samples."""
        times = [request.times for request in self.requests]
        return RequestMetrics(
            arrival_time=self.arrival_time,
            queued_ts=times[0].queued,
            # The first sample, if it scores the prompt, may begin after others, behind whose cached prompt it is.
            scheduled_ts=min((each.scheduled for each in times if each.scheduled), default=0.0),
            first_token_ts=min((each.first_token for each in times if each.first_token), default=0.0),
            last_token_ts=max(each.last_token for each in times),
            num_generation_tokens=sum(request.num_output for request in self.requests),
        )
