"""What a request asks of sampling and of where its output ends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.verify.sampling import LEAST_TEMPERATURE

_COUNTS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of a request, by vLLM's names and with its meanings.

    Attributes:
        n: independent outputs.
        temperature: 0 for greedy decoding.
        top_p: probability mass kept, in (0, 1].
        top_k: most likely tokens kept; 0 or -1 for all.
        min_p: least probability kept, as a share of the likeliest token's, in [0, 1].
        repetition_penalty: above 1, tokens of prompt and output become less likely; above 0.
        presence_penalty: subtracted from logits of tokens in the output, in [-2, 2].
        frequency_penalty: the same, times how often they occur, in [-2, 2].
        logit_bias: per token id what is added to its logit, in [-100, 100].
        allowed_token_ids: the only tokens that may be generated.
        bad_words: words that may not be generated.
        seed: of the request's randomness; None draws one.
        max_tokens: most tokens generated; None up to the end of the context.
        min_tokens: tokens before which neither an end token nor a stop string ends the output.
        stop: strings before which the text ends.
        stop_token_ids: tokens after which the output ends, besides the model's own end token.
        include_stop_str_in_output: the text holds the stop string, or the stop token's text, as well.
        ignore_eos: go on after the end token.
        logprobs: per generated token, log-probabilities of so many likeliest tokens and of itself; -1 for all.
        prompt_logprobs: the same for the prompt's tokens, always before any parameter is applied.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError: a value outside its range, named.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def demand(name: str, holds: bool, wanted: str) -> None:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {wanted}")

        for name in _COUNTS:
            value = getattr(self, name)
            demand(name, value is None or (isinstance(value, int) and not isinstance(value, bool)), "a whole number")
        for name in _NUMBERS:
            demand(name, _is_number(getattr(self, name)), "a number")
        for name in ("stop", "bad_words"):
            demand(name, all(isinstance(text, str) for text in self._texts(name)), "text, or a list of texts")
        demand("n", self.n >= 1, "at least 1")
        demand("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "0 or more")
        demand("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        demand("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for all tokens")
        demand("min_p", 0 <= self.min_p <= 1, "at least 0 and at most 1")
        demand("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 and finite")
        demand("presence_penalty", -2 <= self.presence_penalty <= 2, "at least -2 and at most 2")
        demand("frequency_penalty", -2 <= self.frequency_penalty <= 2, "at least -2 and at most 2")
        demand("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        demand("min_tokens", self.min_tokens >= 0, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}")
        demand("seed", self.seed is None or 0 <= self.seed < 1 << 63, "between 0 and 2^63 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            demand(name, value is None or value >= -1, "0 or more, or -1 for all tokens")
        for token, bias in (self.logit_bias or {}).items():
            if not (_is_number(bias) and -100 <= bias <= 100):
                raise ValueError(f"logit_bias of token {token} is {bias}; it must be at least -100 and at most 100")
        demand("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "not empty")
        if any(not stop for stop in self.stop_strings):
            raise ValueError("stop holds an empty string; leave it out or give at least one character")
        if isinstance(self.bad_words, str) or any(not word.strip() for word in self.bad_words):
            raise ValueError(f"bad_words is {self.bad_words!r}; it must be a list of words that are not empty")
        if self.n > 1 and self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"n is {self.n}; at temperature 0 all outputs are the same, so it must be 1")

    def _texts(self, name: str) -> Sequence[object]:
        value = getattr(self, name)
        return [value] if isinstance(value, str | bytes) else value or ()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_tokens(self, vocab_size: int) -> None:
        """Refuse token ids and counts that the vocabulary does not have.

        Raises:
            ValueError: the parameter, the value and the range.
        """
        ids = {
            "logit_bias": list(self.logit_bias or {}),
            "allowed_token_ids": list(self.allowed_token_ids or ()),
            "stop_token_ids": list(self.stop_token_ids or ()),
        }
        for name, tokens in ids.items():
            for token in tokens:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                    raise ValueError(f"{name} holds {token!r}; token ids lie between 0 and {vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at most the vocabulary's {vocab_size}")


# A length to this power is still a float.
MOST_LENGTH_PENALTY = 50


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search, by vLLM's names; `early_stopping` is transformers'.

    A sequence's score is its cumulative log-probability divided by its number of generated tokens, the end token
    included, to the power of `length_penalty`.

    Attributes:
        beam_width: sequences kept at every step, and returned; 1 is greedy decoding.
        max_tokens: most tokens generated.
        ignore_eos: go on after the end token.
        length_penalty: above 0 favours longer sequences, below 0 shorter ones; in [-50, 50].
        early_stopping: when a search ends that has `beam_width` ended sequences. True: at once. False: as soon as
            the best live beam, were it to end now, would not score better than the worst of them. "never": as soon as
            no live beam could, up to its greatest length.

    Raises:
        ValueError: a value outside its range, named.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        def demand(name: str, holds: bool, wanted: str) -> None:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            demand(name, whole and value >= 1, "a whole number of at least 1")
        demand("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")
        penalty, most = self.length_penalty, MOST_LENGTH_PENALTY
        number = isinstance(penalty, int | float) and not isinstance(penalty, bool) and math.isfinite(penalty)
        demand("length_penalty", number and abs(penalty) <= most, f"a number of at least -{most} and at most {most}")
        stopping = self.early_stopping
        demand("early_stopping", isinstance(stopping, bool) or stopping == "never", "True, False or 'never'")

    def score(self, cum_logprob: float, num_tokens: int) -> float:
        """What sequences of so many generated tokens are compared by."""
        return cum_logprob / math.pow(num_tokens, self.length_penalty)
