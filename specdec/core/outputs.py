"""What the engine hands back."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

# Of the model's own distribution, or of the one that is sampled from.
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class Logprob(NamedTuple):
    """Of one token at one place.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the likeliest; how many tokens are at least as likely.
        decoded_token: its text alone, None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class SpeculationStats:
    """How speculation went for one request.

    A step here is a forward pass of the target that followed a known token; the pass over the prompt, which
    yields the first token and can carry no draft, is none.

    Attributes:
        steps: target passes after the prompt's.
        tokens: tokens they yielded, as kept in the output.
        accepted_per_depth: steps in which the draft token at depth 1, 2, ... was accepted and kept.
        drafted: draft nodes verified.
    """

    steps: int = 0
    tokens: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    drafted: int = 0

    @property
    def tau(self) -> float:
        """Mean tokens a step: accepted ones and the target's own."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def accepted_per_step(self) -> float:
        return sum(self.accepted_per_depth) / self.steps if self.steps else 0.0

    def add(self, other: "SpeculationStats") -> None:
        """Count another request's steps as well."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.drafted += other.drafted
        self.accepted_per_depth += [0] * (len(other.accepted_per_depth) - len(self.accepted_per_depth))
        for depth, count in enumerate(other.accepted_per_depth):
            self.accepted_per_depth[depth] += count

    def count(self, accepted: int, kept: int, drafted: int) -> None:
        """A step that accepted `accepted` drafts, of whose tokens the output kept `kept`."""
        self.steps += 1
        self.tokens += kept
        self.drafted += drafted
        depths = min(accepted, kept)
        self.accepted_per_depth += [0] * (depths - len(self.accepted_per_depth))
        for depth in range(depths):
            self.accepted_per_depth[depth] += 1


class Segment(NamedTuple):
    """A piece of new text, and whether its tokens came from an accepted draft."""

    text: str
    accepted: bool


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: which of the request's samples.
        text: decoded text, without special tokens and cut before a stop string.
        token_ids: all generated tokens.
        accepted: per token, whether it came from an accepted draft.
        finish_reason: "stop", "length", "abort", "error", or None while it goes on.
        stop_reason: the stop string or stop token id that ended it, None for the end token or another reason.
        error: why it failed.
        logprobs: per token, its own entry and those of the likeliest; None unless asked for.
        cumulative_logprob: sum over the generated tokens; None likewise.
        stats: speculation figures so far.
        segments: text that is new since the state before.
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
    segments: list[Segment] = field(default_factory=list)


@dataclass(frozen=True)
class RequestOutput:
    """State of a request after a step.

    Attributes:
        request_id: as given or drawn.
        prompt: the prompt's text, None where token ids were given.
        prompt_token_ids: the prompt's tokens.
        outputs: the generated sequences, `SamplingParams.n` of them.
        finished: whether this is the last state.
        prompt_logprobs: per prompt token like `CompletionOutput.logprobs`, None for the first; None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

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


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence that a beam search has found, by vLLM's names.

    Attributes:
        tokens: the prompt and all generated tokens, the end token included.
        logprobs: per generated token, its own entry and those of the likeliest others.
        cum_logprob: sum over the generated tokens.
        score: what sequences are ordered by; see `BeamSearchParams`.
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
    """What a beam search has found.

    Attributes:
        sequences: best first, `BeamSearchParams.beam_width` of them; fewer where there are not as many, none after an
            error.
        error: why it failed.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None
