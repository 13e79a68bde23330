"""Parameters of sampling, of where an output ends, and of beam search."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

from specdec.core.errors import wrong
from specdec.core.outputs import RequestOutputKind
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.kernels.types.settings import MAX_WHOLE, Foreign, check_settings, check_text, checked_keywords, setting
from specdec.verify.sampling import LEAST_TEMPERATURE

# Parameters of vLLM's, now or once, that are not supported, with the values that ask for nothing.
FOREIGN_SAMPLING = {
    "logits_processors": Foreign("use logit_bias, allowed_token_ids, bad_words or structured_outputs", ([],)),
    "guided_decoding": Foreign("use structured_outputs"),
    "best_of": Foreign("use n, and choose among the outputs", (1,)),
    "use_beam_search": Foreign("use LLM.beam_search", (False,)),
    "length_penalty": Foreign("use LLM.beam_search", (1, 1.0)),
    "early_stopping": Foreign("use LLM.beam_search", (False,)),
    "flat_logprobs": Foreign("log-probabilities are lists of dicts", (False,)),
    **dict.fromkeys(
        ("logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
        Foreign("use logprobs or prompt_logprobs, or choices for the scores of given tokens"),
    ),
    "stream_interval": Foreign("each step that brings tokens is a state of the stream", (1,)),
    "skip_reading_prefix_cache": Foreign("use cache_salt, or enable_prefix_caching of the engine", (False,)),
    "repetition_detection": Foreign("use repetition_penalty or max_tokens"),
    "routed_experts_prompt_start": Foreign("models have no experts", (0,)),
    "trace_decode_token_ids": Foreign("use choices for the scores of given tokens"),
    "skip_clone": Foreign("a request keeps the values that it began with", (False,)),
    "output_text_buffer_length": Foreign("leave it out", (0,)),
    "extra_args": Foreign("leave it out", ({},)),
}
# Parameters of a beam search.
FOREIGN_BEAMS = {
    "temperature": Foreign("a beam search takes the most probable tokens; leave it out", (0, 0.0)),
    "include_stop_str_in_output": Foreign("a search has no stop strings; leave it out", (False,)),
}
_PENALTY: dict[str, Any] = {"least": -2, "most": 2}
_SCORED: dict[str, Any] = {"least": -1, "wanted": "0 or more, or -1 for all tokens", "flags": ""}


@checked_keywords()
@dataclass(frozen=True)
class Speculation:
    """Bounds of one request's drafts, within those of the engine.

    They change the speed of the request and, with the default acceptance rule, none of its tokens. The other rules keep
    the distribution of the output, as they do with any draft.

    Raises:
        ValueError: a value outside its range; names the setting, the value and the range.
    """

    enabled: bool = setting(True, "Whether the request gets drafts.")
    max_nodes: int | None = setting(
        None, "Most draft nodes in a step; None: as many as the engine drafts.", least=1, wanted="at least 1, or None"
    )
    max_depth: int | None = setting(
        None, "Most draft tokens in a row; None: as many as the engine drafts.", least=1, wanted="at least 1, or None"
    )

    def __post_init__(self) -> None:
        check_settings(self)


@checked_keywords(FOREIGN_SAMPLING)
@dataclass
class SamplingParams:
    """Parameters of a request, by vLLM's names and with its meanings.

    Without `max_tokens` (None), a request may go on to the end of the context; without `seed` (None, or -1), one is
    drawn. True for log-probabilities is 1, and False is None. A field that is assigned is checked like one that is
    given. A request keeps the values that it began with.

    Raises:
        ValueError: a parameter that is unknown or not supported, or a value outside its range.
    """

    PANEL: ClassVar[str] = "Sampling"

    n: int = setting(1, "Independent outputs of a prompt.", least=1, most=16384, flags="")
    temperature: float = setting(
        1.0, "0 for greedy decoding, higher for more variety.", least=0, wanted="0 or more and finite", short="-t"
    )
    top_p: float = setting(1.0, "Probability mass to sample from, above 0 and at most 1.", above=0, most=1)
    top_k: int = setting(
        0, "Likeliest tokens to sample from; 0 or -1 for all.", least=-1, wanted="at least 1, or 0 or -1 for all tokens"
    )
    min_p: float = setting(
        0.0, "Least probability sampled, as a share of the likeliest token's, from 0 to 1.", least=0, most=1
    )
    repetition_penalty: float = setting(
        1.0, "Above 1, tokens of prompt and output become less likely.", above=0, wanted="above 0 and finite"
    )
    presence_penalty: float = setting(
        0.0, "Subtracted from the logits of tokens in the output, from -2 to 2.", **_PENALTY
    )
    frequency_penalty: float = setting(
        0.0, "Subtracted from a token's logit once per occurrence in the output, from -2 to 2.", **_PENALTY
    )
    logit_bias: Mapping[int, float] | None = setting(
        None, "Numbers from -100 to 100 to add to the logits of these token ids.", flags=""
    )
    allowed_token_ids: Sequence[int] | None = setting(None, "The only tokens that may be generated.", flags="")
    bad_words: Sequence[str] = setting((), "Never generate this; repeatable.", flags="--bad-word", metavar="TEXT")
    seed: int | None = setting(
        None,
        "Seed of the sampling; -1 to draw one.",
        least=0,
        most=MAX_WHOLE,
        wanted="between 0 and 2^63 - 1, or -1 for a drawn one",
        shown_default="drawn anew",
        short="-s",
    )
    max_tokens: int | None = setting(16, "Most tokens to generate per prompt.", least=1, short="-n")
    min_tokens: int = setting(
        0, "Tokens before which no end token or stop string ends the output.", least=0, wanted="0 or more"
    )
    stop: str | Sequence[str] | None = setting(
        None, "End the text before this; repeatable. May hold special tokens.", metavar="TEXT"
    )
    stop_token_ids: Sequence[int] | None = setting(
        None, "Tokens after which the output ends, besides the model's own end tokens.", flags=""
    )
    include_stop_str_in_output: bool = setting(
        False, "Keep the stop string, or the stop token's text, in the text.", flags=""
    )
    ignore_eos: bool = setting(False, "Go on after the model's end token.", flags="--ignore-eos")
    logprobs: int | None = setting(
        None, "Likeliest tokens whose log-probabilities are returned per generated token; -1 for all.", **_SCORED
    )
    prompt_logprobs: int | None = setting(
        None,
        "Number of most likely tokens reported per prompt token; log-probabilities are before any parameter.",
        **_SCORED,
    )
    skip_special_tokens: bool = setting(True, "Leave special tokens out of the text.", flags="")
    kept_special_tokens: Sequence[int] | None = setting(
        None, "Special tokens that `skip_special_tokens` keeps in the text, such as tags of tool calls.", flags=""
    )
    spaces_between_special_tokens: bool = setting(
        True, "Keep the spaces that a tokenizer writes between special tokens, where those are not left out.", flags=""
    )
    detokenize: bool = setting(True, "Make text of the tokens; without it, outputs hold token ids alone.", flags="")
    truncate_prompt_tokens: int | None = setting(
        None,
        "Truncate the prompt to its last N tokens; -1: to as many as leave room for one generated token.",
        least=-1,
        wanted="at least 1, or -1 for as many as there is room for",
        flags="",
    )
    output_kind: RequestOutputKind = setting(
        RequestOutputKind.CUMULATIVE,
        "What the states of a stream hold: CUMULATIVE, the output so far; DELTA, what is new; FINAL_ONLY, the last "
        "state alone.",
        wanted="a `RequestOutputKind`",
        shown_default="CUMULATIVE",
        flags="",
    )
    speculation: Speculation = setting(
        Speculation(),
        "Whether the request gets drafts, and how large its trees may be.",
        wanted="a `Speculation`",
        shown_default="`Speculation()`",
        flags="",
    )
    prediction: str | Sequence[int] | None = setting(
        None,
        "Text or token ids that the output will probably repeat, such as a file before an edit. They are drafted, and "
        "change no token.",
        flags="",
    )
    choices: Sequence[str | Sequence[int]] | None = setting(
        None,
        "Continuations of the prompt, as texts or token ids, to score in place of generating: the log-probability of "
        "each of their tokens, before any parameter is applied.",
        flags="",
    )
    structured_outputs: StructuredOutputsParams | None = setting(
        None,
        "Form that the output follows, behind its thinking if it thinks: a JSON schema, a regular expression, a choice "
        "or a grammar.",
        wanted="`StructuredOutputsParams`, or None",
        flags="",
    )
    thinking_token_budget: int | None = setting(
        None,
        "Most tokens that a model with a reasoning_parser thinks, behind which its end mark is forced; -1 for any "
        "number.",
        least=0,
        wanted="0 or more, or -1 for any number",
        shown_default="any number",
    )
    reasoning_ended: bool | None = setting(
        None,
        "Whether the output is an answer from its first token on, with a reasoning_parser; None: as the prompt's marks "
        "show.",
        flags="",
    )

    def __post_init__(self) -> None:
        self._take_vllm_spellings()
        check_settings(self)
        if not isinstance(self.speculation, Speculation):
            wanted = "Speculation(enabled, max_nodes, max_depth)"
            raise wrong("speculation", f"is {self.speculation!r}; it must be {wanted}")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            wanted = "StructuredOutputsParams(json, regex, choice, grammar or json_object), or None"
            raise wrong("structured_outputs", f"is {self.structured_outputs!r:.50}; it must be {wanted}")
        if not isinstance(self.output_kind, RequestOutputKind):
            wanted = "RequestOutputKind.CUMULATIVE, DELTA or FINAL_ONLY"
            raise wrong("output_kind", f"is {self.output_kind!r}; it must be {wanted}")
        if self.truncate_prompt_tokens == 0:
            raise wrong("truncate_prompt_tokens", "is 0; it must be at least 1, or -1 for as many as there is room for")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong("min_tokens", f"is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}")
        if self.n > 1 and self.temperature < LEAST_TEMPERATURE:
            raise wrong("n", f"is {self.n}; at temperature 0 all outputs are the same, so it must be 1")
        for name in ("stop", "bad_words"):
            self._check_texts(name)
        if any(not stop for stop in self.stop_strings):
            raise wrong("stop", "holds an empty string; leave it out or give at least one character")
        if isinstance(self.bad_words, str) or any(not word.strip() for word in self.bad_words):
            raise wrong("bad_words", f"is {self.bad_words!r}; it must be a list of words that are not empty")
        for name in ("allowed_token_ids", "stop_token_ids", "kept_special_tokens"):
            self._set(name, self._token_ids(name))
        if isinstance(self.prediction, str):
            check_text("prediction", self.prediction)
        else:
            self._set("prediction", self._token_ids("prediction"))
        if self.choices is not None:
            self._check_choices()
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise wrong("allowed_token_ids", f"is {self.allowed_token_ids}; it must be not empty")
        for token, bias in (self.logit_bias or {}).items():
            if isinstance(bias, bool) or not isinstance(bias, Real) or not -100 <= bias <= 100:
                raise wrong("logit_bias", f"of token {token} is {bias!r}; it must be at least -100 and at most 100")
        if not self.detokenize and self.stop_strings:
            raise wrong("stop", "needs detokenize; use stop_token_ids, or leave detokenize True")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field, and check all of them together."""
        if len(vars(self)) < len(fields(self)):
            # Called by `__init__`.
            self._set(name, value)
        else:
            vars(self).update(vars(replace(self, **{name: value})))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _take_vllm_spellings(self) -> None:
        """Replace other spellings that vLLM has for a default, or for 1."""
        for name in ("seed", "thinking_token_budget"):
            if getattr(self, name) == -1:
                self._set(name, None)
        if self.bad_words is None:
            self._set("bad_words", ())
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(value := getattr(self, name), bool):
                self._set(name, 1 if value else None)

    def _check_texts(self, name: str) -> None:
        value = getattr(self, name)
        texts = [value] if isinstance(value, str) else value or ()
        if not isinstance(texts, Collection) or not all(isinstance(text, str) for text in texts):
            raise wrong(name, f"is {value!r}; it must be text, or a list of texts")
        for text in texts:
            check_text(name, text)

    def _token_ids(self, name: str) -> Collection[int] | None:
        """Return token ids as they were given, but for an array's, which become a list."""
        value = getattr(self, name)
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, Collection | None):
            raise wrong(name, f"is {value!r}; it must be a list of token ids")
        return value

    def _check_choices(self) -> None:
        given = self.choices
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise wrong("choices", f"is {given!r:.50}; it must be a list of texts, or of lists of token ids")
        if all(isinstance(choice, str) for choice in given):
            self._check_texts("choices")
        else:
            self._set("choices", [self._choice_ids(choice) for choice in given])
        if not all(given):
            raise wrong("choices", "holds an empty one; leave it out or give at least one token")
        for name in ("n", "logprobs", "prompt_logprobs", "structured_outputs", "prediction", "stop"):
            if (value := getattr(self, name)) not in (None, 1 if name == "n" else None, [], ()):
                raise wrong(name, f"is {value!r:.50}; a request with choices generates nothing: leave it out")

    def _choice_ids(self, choice: Any) -> list[int]:
        choice = choice.tolist() if hasattr(choice, "tolist") else choice
        if isinstance(choice, str) or not isinstance(choice, Sequence):
            raise wrong("choices", f"holds {choice!r:.50}; it must be a list of texts, or of lists of token ids")
        return list(choice)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_tokens(self, vocab_size: int) -> None:
        """Reject token ids and counts that the vocabulary does not have.

        Raises:
            ValueError: the parameter, the value and the range.
        """
        lists = ("logit_bias", "allowed_token_ids", "stop_token_ids", "kept_special_tokens", "prediction")
        given = [(name, getattr(self, name)) for name in lists]
        for name, tokens in [*given, *(("choices", choice) for choice in self.choices or ())]:
            for token in () if tokens is None or isinstance(tokens, str) else tokens:
                if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
                    raise wrong(name, f"holds {token!r}; token ids lie between 0 and {vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise wrong(name, f"is {getattr(self, name)}; it must be at most the vocabulary's {vocab_size}")


@checked_keywords(FOREIGN_BEAMS)
@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search, by vLLM's names; `early_stopping` is transformers'.

    A sequence's score is its cumulative log-probability divided by its number of generated tokens, the end token
    included, to the power of `length_penalty`. `check_settings` refuses values outside their range.
    """

    beam_width: int = setting(
        help="Sequences kept at every step, and returned; 1 is greedy decoding.",
        least=1,
        wanted="a whole number of at least 1",
    )
    max_tokens: int = setting(help="Most tokens to generate.", least=1)
    ignore_eos: bool = setting(False, "Go on after the model's end token.")
    length_penalty: float = setting(
        1.0,
        "Above 0 favours longer sequences, below 0 shorter ones; from -50 to 50.",
        # A length to the power of 50 is still a float.
        least=-50,
        most=50,
        wanted="a number of at least -50 and at most 50",
    )
    early_stopping: bool | Literal["never"] = setting(
        False,
        "When a search with `beam_width` ended sequences stops. True: at once. False: as soon as the best live beam, "
        'were it to end now, would not score better than the worst of them. "never": as soon as no live beam could, '
        "up to its greatest length.",
        wanted="True, False or 'never'",
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def score(self, cum_logprob: float, num_tokens: int) -> float:
        """Return the score of a sequence."""
        return cum_logprob / math.pow(num_tokens, self.length_penalty)
