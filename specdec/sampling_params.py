"""What a request asks of sampling and of where its output ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of a request, by vLLM's names.

    Attributes:
        temperature: 0 for greedy decoding.
        top_p: probability mass kept, in (0, 1].
        top_k: most likely tokens kept; 0 or -1 for all.
        seed: of the request's noise; None draws one.
        max_tokens: most tokens generated; None up to the end of the context.
        stop: strings before which the text ends.
        stop_token_ids: tokens after which the output ends, besides the model's own end token.
        ignore_eos: go on after the end token.

    Raises:
        ValueError: a value outside its range, named.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < -1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or 0 or -1 for all tokens")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}; it must lie between 0 and 2^63 - 1")
        if any(not stop for stop in self.stop_strings):
            raise ValueError("stop holds an empty string; leave it out or give at least one character")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
