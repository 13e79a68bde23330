"""Texts of requests as tokens: prompts, conversations, choices, predictions and bad words, each checked first."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from specdec.core.errors import wrong
from specdec.core.request_limits import RequestLimits, choice_too_long, prompt_too_long
from specdec.core.sampling_params import SamplingParams
from specdec.engine.prompts import PlainPrompt, as_list
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.settings import ParameterError, check_text
from specdec.models.tokenizer import Tokenizer

# Characters of a token where they have no limit: more than a text's tokens have on average.
_ASSUMED = 128
# Tokens of a prompt whose text a choice is tokenized behind.
_CHOICE_CONTEXT = 16
# Lists of bad words whose tokens are remembered: all prompts of a request have the same.
_MOST_LISTS = 8
Words = tuple[tuple[int, ...], ...]

logger = logging.getLogger(__name__)


class RequestTexts:
    """Makes tokens of texts that a request may have. Its methods may be called from several threads.

    Texts that are too long are refused by their characters, which takes no time, before they are tokenized.

    Args:
        tokenizer: None for a model without one, whose prompts must be token ids.
        model: the model, as errors name it.
        max_model_len: limit of a request's tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: RequestLimits, model: Path, max_model_len: int) -> None:
        self.tokenizer, self._limits = tokenizer, limits
        self._model, self._context = model, max_model_len
        self._has_warned_of_tools = False

    @cached_property
    def _longest(self) -> int | None:
        """Characters that a token stands for at most, None where they have no limit."""
        return self.need_tokenizer().longest_token

    @cached_property
    def _words(self) -> Callable[[tuple[str, ...]], Words]:
        return lru_cache(_MOST_LISTS)(self.need_tokenizer().encode_words)

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ValueError: a model without one.
        """
        if self.tokenizer is None:
            raise ParameterError("prompt", f"{self._model}: no tokenizer.json; give prompts as token ids")
        return self.tokenizer

    def encode(
        self, texts: Sequence[str], add_special_tokens: bool = True, may_be_longer: bool = True
    ) -> list[list[int]]:
        """Return the tokens of prompts.

        Args:
            may_be_longer: whether they may have more tokens than the context, because they are truncated or only their
                tokens are asked for.

        Raises:
            ValueError: one of them has too many characters, or a model without a tokenizer.
        """
        for text in texts:
            check_text("the prompt", text, "prompt")
        tokenizer = self.need_tokenizer()
        for text in texts:
            self._check_prompt(text, may_be_longer)
        return tokenizer.encode_batch(texts, add_special_tokens)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any], may_be_longer: bool = True
    ) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins.

        Args:
            may_be_longer: see `encode`.

        Raises:
            ValueError: see `LLM.chat_prompt`.
        """
        text = self._chat_text(messages, template_arguments)
        return self.encode([text], add_special_tokens=False, may_be_longer=may_be_longer)[0]

    def chat_choices(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, template_arguments: Mapping[str, Any]
    ) -> tuple[PlainPrompt, SamplingParams]:
        """Return the tokens of a conversation, and parameters with the tokens of text choices that continue it.

        Raises:
            ValueError: see `LLM.chat_prompt`.
        """
        text = self._chat_text(messages, template_arguments)
        return self.with_tokens(text, params, add_special_tokens=False)

    def _chat_text(self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]) -> str:
        tokenizer = self.need_tokenizer()
        if not tokenizer.has_chat_template and template_arguments.get("chat_template") is None:
            raise ParameterError(
                "prompt", f"{self._model}: the tokenizer has no chat template; give the prompt as it is"
            )
        plain = tokenizer.chat_messages(messages, **template_arguments)
        if template_arguments.get("tools") and not self._has_warned_of_tools:
            self._has_warned_of_tools = not tokenizer.reads_tools(**template_arguments)
            if self._has_warned_of_tools:
                logger.warning(
                    "a conversation has tools, and the chat template does not read them, so the model does not see "
                    "them; give a chat template that does (shown once)"
                )
        return tokenizer.chat_text(plain, **template_arguments)

    def with_tokens(
        self, prompt: PlainPrompt, params: SamplingParams, add_special_tokens: bool = True
    ) -> tuple[PlainPrompt, SamplingParams]:
        """Return a prompt and its parameters with choices and the predicted text as tokens; see `with_choice_tokens`.

        Raises:
            ValueError: a list or a text that is too long, or text without a tokenizer.
        """
        self._limits.check(params)
        choices = [choice for choice in params.choices or () if isinstance(choice, str)]
        if choices and self.tokenizer is not None:
            self._check_choices(prompt if isinstance(prompt, str) else "", choices)
        if isinstance(params.prediction, str):
            if self.tokenizer is None:
                raise wrong("prediction", "needs a tokenizer, and the model's folder has none; give token ids")
            longest = (self._longest or _ASSUMED) * self._context
            predicted = self.tokenizer.encode(params.prediction[:longest], add_special_tokens=False)
            params = replace(params, prediction=predicted[: self._context])
        return with_choice_tokens(prompt, params, self.tokenizer, add_special_tokens)

    def bad_words(self, params: SamplingParams) -> Words:
        """Return the token sequences that spell bad words.

        Raises:
            ValueError: they have more tokens than the limit.
        """
        if not params.bad_words:
            return ()
        longest = self._longest or _ASSUMED
        self._limits.check_bad_word_tokens(sum(ceil_div(len(word.lstrip()), longest) for word in params.bad_words))
        tokens = self._words(tuple(params.bad_words))
        self._limits.check_bad_word_tokens(sum(map(len, tokens)))
        return tokens

    def _check_prompt(self, text: str, may_be_longer: bool = False) -> None:
        """Refuse a prompt that cannot fit into the context, or takes long to tokenize; see `encode`."""
        # No token stands for less than a character.
        if len(text) <= self._context and not may_be_longer:
            return
        if not may_be_longer and self._longest is not None:
            least = ceil_div(len(text), self._longest)
            if least >= self._context:
                raise prompt_too_long(least, self._context, is_least=True)
            return
        most = max(self._limits.max_text_characters, (self._longest or _ASSUMED) * self._context)
        if len(text) > most:
            raise ParameterError(
                "prompt",
                f"the prompt has {len(text)} characters; at most {most} are tokenized: shorten it, or raise "
                "max_text_characters (--max-text-characters)",
            )

    def _check_choices(self, prompt: str, choices: Sequence[str]) -> None:
        """Refuse text choices that cannot fit into the context behind a prompt, or take long to tokenize."""
        self._check_prompt(prompt)
        most = max(map(len, choices), default=0)
        if len(prompt) + most > self._context and self._longest is not None:
            least = ceil_div(len(prompt) + most, self._longest)
            if least > self._context:
                raise choice_too_long(f"that has, with the prompt, at least {least} tokens", self._context)
        self._limits.check_choice_characters(prompt, choices)


def num_characters(prompt: PlainPrompt, params: SamplingParams) -> int:
    """Return how many characters of a request are tokenized: the prompt's once for each text choice, and all others."""
    choices = [choice for choice in params.choices or () if isinstance(choice, str)]
    others = (params.prediction, *params.bad_words, *choices)
    size = len(prompt) * max(len(choices), 1) if isinstance(prompt, str) else 0
    return size + sum(len(text) for text in others if isinstance(text, str))


def with_choice_tokens(
    prompt: PlainPrompt, params: SamplingParams, tokenizer: Tokenizer | None, add_special_tokens: bool = True
) -> tuple[PlainPrompt, SamplingParams]:
    """Return a prompt and its parameters with choices as token ids.

    A text prompt is tokenized together with each of its choices, so that the tokens are those of the whole text; a
    token at the seam may hold a part of both. The prompt's tokens are those that all these texts begin with. A prompt
    of token ids stays as it is; see `_tokens_after`.

    Args:
        add_special_tokens: whether a text prompt lacks the special tokens that the tokenizer adds to a text.

    Raises:
        ValueError: choices are texts, and there is no tokenizer.
    """
    choices = [choice for choice in params.choices or () if isinstance(choice, str)]
    if not choices:
        return prompt, params
    if tokenizer is None:
        raise ValueError("choices are texts, and the model's folder has no tokenizer; give token ids")
    if not isinstance(prompt, str):
        return prompt, replace(params, choices=_tokens_after(prompt, choices, tokenizer))
    alone, *texts = tokenizer.encode_batch([prompt, *(prompt + choice for choice in choices)], add_special_tokens)
    # At least one token of each text is the choice's, also where its text is one that a tokenizer drops.
    end = min(common_length([alone, *texts]), min(map(len, texts)) - 1)
    return texts[0][:end], replace(params, choices=[text[end:] for text in texts])


def _tokens_after(prompt: Sequence[int], choices: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of choices that continue a prompt of token ids.

    A choice is tokenized behind the text of the prompt's last tokens, since tokenizers write the beginning of a text
    differently: those of SentencePiece's kind put a space before it, and some another one behind a special token.
    Where its tokens there are not its text, or one would hold a part of both, it is tokenized behind the end of a
    line, and where that is not possible either, by itself.
    """
    ids = as_list(prompt)
    tail = ids[-_CHOICE_CONTEXT:] if isinstance(ids, list | tuple) else []
    # Others are refused later.
    known = [token for token in tail if type(token) is int and 0 <= token < tokenizer.backend.get_vocab_size()]
    context = _text(tokenizer, known)
    found = tokenizer.encode_batch(choices, False)
    is_whole = [False for _ in choices]
    for before in (context, "\n"):
        alone, *texts = tokenizer.encode_batch([before, *(before + choice for choice in choices)], False)
        for place, (text, choice) in enumerate(zip(texts, choices, strict=True)):
            own = text[len(alone) :]
            continues = text[: len(alone)] == alone and bool(own)
            if not is_whole[place] and continues and _text(tokenizer, [*known, *own]) == context + choice:
                found[place], is_whole[place] = own, True
    return found


def _text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return tokenizer.backend.decode(tokens, skip_special_tokens=False)


def common_length(sequences: Sequence[list[int]]) -> int:
    """Return how many first tokens all sequences share."""
    # All sequences lie between the first and the last in order.
    first, last = min(sequences), max(sequences)
    pairs = zip(first, last, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))
