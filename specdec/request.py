"""A request: its tokens, how far its cache has come, and where its output ends."""

import secrets
from dataclasses import dataclass, field, replace

from specdec.detokenizer import Detokenizer
from specdec.outputs import CompletionOutput, RequestOutput, SpeculationStats
from specdec.sampling_params import SamplingParams
from specdec.verify.sampling import Sampling


@dataclass(eq=False)
class Request:
    """The only mutable object of the domain. `num_cached < len(token_ids)` while it lives.

    Attributes:
        prompt: text as given, None for token ids.
        token_ids: prompt and output.
        num_prompt: tokens of the prompt.
        max_length: most tokens it may come to, prompt included.
        end_tokens: tokens after which the output ends.
        num_cached: tokens whose keys and values are in the cache.
        block_table: cache blocks, in order.
        accepted: per output token, whether a draft had it.
    """

    request_id: str
    prompt: str | None
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    max_length: int
    end_tokens: frozenset[int]
    detokenizer: Detokenizer
    num_cached: int = 0
    block_table: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def __post_init__(self) -> None:
        params = self.params
        self.sampling = Sampling(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
        )

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
        stopped = self.detokenizer.push(token, accepted)
        if stopped:
            self.finish_reason, self.stop_reason = "stop", self.detokenizer.matched
        elif token in self.end_tokens:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self.params.stop_token_ids else None
        elif self.num_remaining == 0:
            self.finish_reason = "length"

    def output(self) -> RequestOutput:
        """A snapshot, with the text that is new since the last one."""
        segments = self.detokenizer.segments(final=self.finished)
        completion = CompletionOutput(
            index=0,
            text=self.detokenizer.text,
            token_ids=self.token_ids[self.num_prompt :],
            accepted=list(self.accepted),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.token_ids[: self.num_prompt],
            outputs=[completion],
            finished=self.finished,
            stats=replace(self.stats, accepted_per_depth=list(self.stats.accepted_per_depth)),
            segments=segments,
        )
