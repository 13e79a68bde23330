"""Texts of a request: refused by their characters where they are too long, and tokenized."""

from collections.abc import Sequence
from functools import cached_property, lru_cache

from specdec.core.request_limits import RequestLimits
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.settings import ParameterError
from specdec.models.tokenizer import Tokenizer

# Characters of a token where they have no limit: more than a text's tokens have on average.
_ASSUMED = 128
# Lists of bad words whose tokens are remembered: all prompts of a request have the same.
_MOST_LISTS = 8
Words = tuple[tuple[int, ...], ...]


class TextLimits:
    """Checks of texts by their characters, which take no time, before they are tokenized.

    Args:
        max_model_len: limit of a request's tokens.
    """

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits, max_model_len: int) -> None:
        self._tokenizer, self._limits, self._context = tokenizer, limits, max_model_len
        self._words = lru_cache(_MOST_LISTS)(tokenizer.encode_words)

    @cached_property
    def _longest(self) -> int | None:
        """Characters that a token stands for at most, None where they have no limit."""
        return self._tokenizer.longest_token

    @cached_property
    def most_characters(self) -> int:
        """Limit of a text of which not all need fit into the context."""
        return max(self._limits.max_text_characters, (self._longest or _ASSUMED) * self._context)

    def check_prompt(self, text: str, may_be_longer: bool = False) -> None:
        """Refuse a prompt that cannot fit into the context.

        Args:
            may_be_longer: whether it is truncated, or only its tokens are asked for.

        Raises:
            ValueError: names its length and the limit.
        """
        # No token stands for less than a character.
        if len(text) <= self._context and not may_be_longer:
            return
        if not may_be_longer and self._longest is not None:
            least = ceil_div(len(text), self._longest)
            if least >= self._context:
                raise ParameterError(
                    "prompt", f"the prompt has at least {least} tokens, and the context is {self._context}; shorten it"
                )
        elif len(text) > self.most_characters:
            raise ParameterError(
                "prompt",
                f"the prompt has {len(text)} characters; at most {self.most_characters} are tokenized: shorten it, or "
                "raise max_text_characters (--max-text-characters)",
            )

    def check_choices(self, prompt: str, choices: Sequence[str]) -> None:
        """Refuse text choices that cannot fit into the context behind a prompt, or take long to tokenize.

        Raises:
            ValueError: names what is too long, and the limit.
        """
        self.check_prompt(prompt)
        most = max(map(len, choices), default=0)
        if len(prompt) + most > self._context and self._longest is not None:
            least = ceil_div(len(prompt) + most, self._longest)
            if least > self._context:
                raise ParameterError(
                    "choices",
                    f"choices holds one that has, with the prompt, at least {least} tokens, and the context is "
                    f"{self._context}; shorten one of them",
                )
        self._limits.check_choice_characters(prompt, choices)

    def bad_words(self, words: Sequence[str]) -> Words:
        """Return the token sequences that spell bad words.

        Raises:
            ValueError: they have more tokens than the limit.
        """
        if not words:
            return ()
        longest = self._longest or _ASSUMED
        self._limits.check_bad_word_tokens(sum(ceil_div(len(word.lstrip()), longest) for word in words))
        tokens = self._words(tuple(words))
        self._limits.check_bad_word_tokens(sum(map(len, tokens)))
        return tokens

    def prediction(self, text: str) -> list[int]:
        """Return the tokens of a predicted text, as many as the context can hold."""
        longest = (self._longest or _ASSUMED) * self._context
        return self._tokenizer.encode(text[:longest], add_special_tokens=False)[: self._context]
