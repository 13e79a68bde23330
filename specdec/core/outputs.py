"""Outputs of requests, and which states of them a stream shows."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal, NamedTuple

from specdec.core.choices import ChoiceScore
from specdec.core.lora_request import LoRARequest
from specdec.text.segment import Segment

# Log-probabilities of the model's own distribution, or of the one that is sampled from.
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class Logprob(NamedTuple):
    """Log-probability of a token at one position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: number of tokens that are at least as probable; 1 for the most probable.
        decoded_token: the token's text inside of a text; None without a tokenizer.
        part_bytes: bytes of a token that is not whole characters; None for another.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    part_bytes: bytes | None = None


@dataclass
class SpeculationStats:
    """Speculation figures of one request.

    The pass over the prompt, which yields the first token and never has drafts, does not count as a step.

    Attributes:
        steps: target passes after the prompt's.
        tokens: tokens of the output that those passes yielded.
        accepted_per_depth: steps in which the draft token at depth 1, 2, ... was accepted and kept.
        drafted: draft nodes verified.
        accepted_prediction, rejected_prediction: tokens of the predicted text that have appeared in the output, and
            that have not; 0 without a prediction.
    """

    steps: int = 0
    tokens: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted_prediction: int = 0
    rejected_prediction: int = 0

    @property
    def tau(self) -> float:
        """Mean tokens per step: accepted drafts and the bonus token."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def accepted_per_step(self) -> float:
        return sum(self.accepted_per_depth) / self.steps if self.steps else 0.0

    @staticmethod
    def total(parts: "Iterable[SpeculationStats]") -> "SpeculationStats":
        """Return the sum of the figures of several requests."""
        total = SpeculationStats()
        for part in parts:
            total.add(part)
        return total

    def add(self, other: "SpeculationStats") -> None:
        """Add the figures of another request, or of a step."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.drafted += other.drafted
        self.accepted_prediction += other.accepted_prediction
        self.rejected_prediction += other.rejected_prediction
        self.accepted_per_depth += [0] * (len(other.accepted_per_depth) - len(self.accepted_per_depth))
        for depth, count in enumerate(other.accepted_per_depth):
            self.accepted_per_depth[depth] += count

    def count(self, accepted: int, kept: int, drafted: int) -> None:
        """Count a step.

        Args:
            accepted: accepted draft tokens.
            kept: tokens that the output kept, the bonus token included.
            drafted: draft nodes verified.
        """
        self.add(SpeculationStats(1, kept, [1] * min(accepted, kept), drafted))


class TreeTrace(NamedTuple):
    """The draft tree of a traced step, and what the output took of it.

    Attributes:
        root: the last known token, under which the tree hangs.
        tokens: token of each node, parents before children; none in a plain step, or in the pass over the prompt.
        parents: index of each node's parent, -1 for a child of the root.
        path: accepted nodes whose tokens the output took, from depth 1 on.
        output: the tokens that the output took: those of `path`, and the bonus token unless the output ended before it.
        values: of each node, the drafter's estimate of the log-probability of its path, by which nodes are ranked; None
            for a node of a source without estimates, such as n-grams.
        probs: of each node, the target's probability of its token after its parent, all sampling parameters applied;
            at temperature 0 that of the model's own distribution after the logit edits.
        seconds: time of the step, from its first work to its tokens, shared with all requests of the step.
        plain_seconds: time that the step would have taken without drafts: its own if it had none, else predicted from
            measured costs; None where they are not measured.
        context: of the output's first step, the prompt's last tokens, as far as the output's text depends on them.
    """

    root: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    output: tuple[int, ...]
    values: tuple[float | None, ...] = ()
    probs: tuple[float, ...] = ()
    seconds: float = 0.0
    plain_seconds: float | None = None
    context: tuple[int, ...] = ()


class Step(NamedTuple):
    """One step of a request.

    Attributes:
        nodes: number of draft nodes.
        accepted: number of those that the output kept.
        trace: the tree itself, if the request is traced.
    """

    nodes: int
    accepted: int
    trace: TreeTrace | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request, by vLLM's names (those of its `RequestStateStats`).

    All but the first are seconds of the monotonic clock, comparable within one machine; 0 for what has not happened.

    Attributes:
        arrival_time: when the request was made, in seconds since 1970.
        queued_ts: when the engine got it.
        scheduled_ts: when its first step was planned.
        first_token_ts, last_token_ts: when its first and its last token came.
        num_generation_tokens: generated tokens of all its samples.
    """

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        """Seconds from the queue to the first token; 0 before it."""
        return max(0.0, self.first_token_ts - self.queued_ts)


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: number of the sample.
        text: decoded text without special tokens, cut before a stop string.
        token_ids: all generated tokens.
        accepted: per token, whether it comes from an accepted draft.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for the end token and other reasons.
        error: reason of a failure.
        logprobs: per token, its own entry and those of the most probable tokens; None unless asked for.
        cumulative_logprob: sum over the generated tokens; None unless `logprobs` are asked for.
        stats: speculation figures so far.
        steps: steps with a draft tree so far, in order; all steps of a traced request.
        segments: new text since the previous state.
    """

    index: int
    text: str
    token_ids: list[int]
    accepted: list[bool]
    finish_reason: str | None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    steps: list[Step] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def finished(self) -> bool:
        """Return whether this is the last state (a method, as in vLLM)."""
        return self.finish_reason is not None

    @property
    def tree_steps(self) -> list[Step]:
        """Steps with a draft tree so far, in order."""
        return [step for step in self.steps if step.nodes]

    @property
    def trace(self) -> list[TreeTrace]:
        """Trees of all steps so far, in order; none unless asked for."""
        return [step.trace for step in self.steps if step.trace is not None]


@dataclass(frozen=True)
class RequestOutput:
    """State of a request after a step.

    Attributes:
        request_id: number of the request.
        prompt: the prompt's text; None if token ids were given.
        prompt_token_ids: the prompt's tokens.
        outputs: the generated sequences, `SamplingParams.n` of them.
        finished: whether this is the last state.
        prompt_logprobs: per prompt token like `CompletionOutput.logprobs`, None for the first; None unless asked for.
        num_cached_tokens: prompt tokens that were found in the prefix cache; None before the request first ran.
        metrics: times of the request.
        choices: the scores of `SamplingParams.choices`, in their order, once all are known; None unless asked for.
        lora_request: the adapter of the request, None without one.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    choices: list[ChoiceScore] | None = None
    lora_request: LoRARequest | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stats(self) -> SpeculationStats:
        return self.outputs[0].stats

    @property
    def segments(self) -> list[Segment]:
        return self.outputs[0].segments


class RequestOutputKind(Enum):
    """States that a stream yields. Calls that return when a request has ended always return its whole output.

    CUMULATIVE: the whole output so far. DELTA: what is new since the state before. FINAL_ONLY: the last state alone.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class ShownStates:
    """The states of one request as its kind of output shows them."""

    kind: RequestOutputKind
    _num_shown: dict[int, int] = field(default_factory=dict)

    def of(self, state: RequestOutput) -> Iterator[RequestOutput]:
        """Yield what is shown of the request's next state, or nothing."""
        if self.kind is RequestOutputKind.DELTA:
            yield replace(state, outputs=[self._delta(output) for output in state.outputs])
        elif self.kind is not RequestOutputKind.FINAL_ONLY or state.finished:
            yield state

    def _delta(self, output: CompletionOutput) -> CompletionOutput:
        old = self._num_shown.get(output.index, 0)
        self._num_shown[output.index] = len(output.token_ids)
        return replace(
            output,
            text="".join(segment.text for segment in output.segments),
            token_ids=output.token_ids[old:],
            accepted=output.accepted[old:],
            logprobs=None if output.logprobs is None else output.logprobs[old:],
        )


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence of a beam search, by vLLM's names.

    Attributes:
        tokens: the prompt and all generated tokens, the end token included.
        logprobs: per generated token, its own entry and those of the most probable others.
        cum_logprob: sum over the generated tokens.
        score: the sequences' order; see `BeamSearchParams`.
        finish_reason: "stop" after an end token, "length" otherwise.
        text: `tokens` decoded, without special ones; None without a tokenizer.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    score: float
    finish_reason: str
    text: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.tokens) - len(self.logprobs) :]


@dataclass(frozen=True)
class BeamSearchOutput:
    """Result of a beam search.

    Attributes:
        sequences: up to `BeamSearchParams.beam_width` sequences, best first; none after an error.
        error: reason of a failure.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None


def taus_in_words(taus: Mapping[str, float]) -> str:
    """Return tau by tree, such as "3.29 (60 nodes, depth 6), 2.46 (8 nodes, depth 6)"."""
    return ", ".join(f"{tau:.2f} ({tree})" for tree, tau in taus.items())
