"""Limits of a request's lists and texts, so that no client's request slows those of others. Pure Python."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from specdec.core.errors import wrong
from specdec.kernels.types.settings import ParameterError, check_settings, setting

# Parameters that are lists, by the setting that limits each.
_COUNTED = {
    "max_bad_words": "bad_words",
    "max_stop_strings": "stop",
    "max_stop_token_ids": "stop_token_ids",
    "max_logit_bias": "logit_bias",
    "max_allowed_token_ids": "allowed_token_ids",
    "max_choices": "choices",
}
# OpenAI's code of a request that the context cannot hold.
_CONTEXT_EXCEEDED = "context_length_exceeded"


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a request; `check_settings` refuses values outside their range.

    Those of bad words, token ids and `logit_bias` are vLLM's. vLLM takes any number of stop strings, OpenAI four.
    """

    PANEL: ClassVar[str] = "Limits"

    max_bad_words: int = setting(128, "Most bad_words of a request.", least=0)
    max_bad_word_tokens: int = setting(
        1024, "Most tokens of a request's bad_words together, each spelled with and without a space.", least=0
    )
    max_stop_strings: int = setting(64, "Most stop strings of a request.", least=0)
    max_stop_characters: int = setting(8192, "Most characters of a request's stop strings together.", least=0)
    max_stop_token_ids: int = setting(128, "Most stop_token_ids of a request.", least=0)
    max_logit_bias: int = setting(1024, "Most tokens in a request's logit_bias.", least=0)
    max_allowed_token_ids: int = setting(1024, "Most allowed_token_ids of a request.", least=0)
    max_choices: int = setting(2048, "Most choices that a request may have scored.", least=0)
    max_choice_characters: int = setting(
        1 << 24, "Most characters of a prompt times its text choices, each of which is tokenized with it.", least=0
    )
    max_text_characters: int = setting(
        1 << 20,
        "Most characters of a text that is tokenized although it may be longer than the context: a prompt that is "
        "truncated, a text of /tokenize; more where the context holds more.",
        least=0,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, given: object) -> None:
        """Refuse lists that are too long.

        Args:
            given: `SamplingParams`, or the body of a request with parameters of the same names.

        Raises:
            ValueError: names the parameter, the limit and the setting.
        """
        for name, parameter in _COUNTED.items():
            value = getattr(given, parameter, None)
            if isinstance(value, Collection) and not isinstance(value, str):
                self._check(name, parameter, len(value), "")
        stop = getattr(given, "stop", None)
        if isinstance(stop, str | Sequence):
            self._check("max_stop_characters", "stop", _num_characters(stop), " characters")

    def check_bad_word_tokens(self, count: int) -> None:
        """Refuse bad words of too many tokens.

        Raises:
            ValueError: names the limit and the setting.
        """
        self._check("max_bad_word_tokens", "bad_words", count, " tokens")

    def check_choice_characters(self, prompt: str, choices: Sequence[Any]) -> None:
        """Refuse text choices that would take long to tokenize, each together with the prompt.

        Raises:
            ValueError: names the number of characters, the limit and the setting.
        """
        total = len(prompt) * len(choices) + _num_characters(choices)
        if total > self.max_choice_characters:
            raise ParameterError(
                "prompt",
                f"the prompt has {len(prompt)} characters, and with {len(choices)} choices {total}; at most "
                f"{self.max_choice_characters} are allowed: give token ids, fewer choices at a time, or raise "
                "max_choice_characters",
            )

    def _check(self, name: str, parameter: str, count: int, what: str) -> None:
        most = getattr(self, name)
        if count > most:
            remedy = f"send fewer, or raise {name} (--{name.replace('_', '-')})"
            raise wrong(parameter, f"holds {count}{what}; at most {most} are allowed: {remedy}")


def prompt_too_long(count: int, context: int, *, is_least: bool = False) -> ParameterError:
    """Return the error of a prompt that leaves no room for an answer.

    Clients shorten their conversation where they find OpenAI's or Anthropic's words, so the message has both.

    Args:
        count: tokens of the prompt.
        context: most tokens of prompt and answer.
        is_least: whether the prompt may have more tokens.
    """
    shown = f"at least {count}" if is_least else str(count)
    message = (
        f"the prompt is too long: {shown} tokens > {context - 1} maximum; this model's maximum context length is "
        f"{context} tokens, one of them the answer's: shorten it"
    )
    return ParameterError("prompt", message, _CONTEXT_EXCEEDED)


def choice_too_long(choice: str, context: int) -> ParameterError:
    """Return the error of a choice that the context cannot hold with its prompt.

    Args:
        choice: how long both are, in words behind "one".
    """
    message = (
        f"choices holds one {choice}, and this model's maximum context length is {context} tokens; shorten one of them"
    )
    return ParameterError("choices", message, _CONTEXT_EXCEEDED)


def _num_characters(texts: str | Sequence[Any] | Mapping[Any, Any]) -> int:
    """Return the number of characters of a text, or of the texts in a list."""
    return len(texts) if isinstance(texts, str) else sum(len(text) for text in texts if isinstance(text, str))
