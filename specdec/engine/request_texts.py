"""Texts of requests as tokens: prompts, conversations, choices, predictions and bad words, each checked first."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec.core.request_limits import RequestLimits
from specdec.core.sampling_params import SamplingParams
from specdec.engine.choice_prompts import with_choice_tokens
from specdec.engine.prompts import PlainPrompt
from specdec.engine.text_limits import TextLimits, Words
from specdec.kernels.types.settings import ParameterError, check_text
from specdec.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class RequestTexts:
    """Makes tokens of texts that a request may have. Its methods may be called from several threads.

    Args:
        tokenizer: None for a model without one, whose prompts must be token ids.
        model: the model, as errors name it.
        max_model_len: limit of a request's tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: RequestLimits, model: Path, max_model_len: int) -> None:
        self.tokenizer, self._limits = tokenizer, limits
        self._model, self._max_model_len = model, max_model_len
        self._has_warned_of_tools = False

    @cached_property
    def _texts(self) -> TextLimits:
        return TextLimits(self.need_tokenizer(), self._limits, self._max_model_len)

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
            self._texts.check_prompt(text, may_be_longer)
        return tokenizer.encode_batch(texts, add_special_tokens)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any],
        may_be_longer: bool = True,
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
            self._texts.check_choices(prompt if isinstance(prompt, str) else "", choices)
        if isinstance(params.prediction, str):
            if self.tokenizer is None:
                raise ParameterError(
                    "prediction", "prediction needs a tokenizer, and the model's folder has none; give token ids"
                )
            params = replace(params, prediction=self._texts.prediction(params.prediction))
        return with_choice_tokens(prompt, params, self.tokenizer, add_special_tokens)

    def bad_words(self, params: SamplingParams) -> Words:
        """Return the token sequences that spell bad words.

        Raises:
            ValueError: they have more tokens than the limit.
        """
        return self._texts.bad_words(params.bad_words) if params.bad_words else ()


def num_characters(prompt: PlainPrompt, params: SamplingParams) -> int:
    """Return how many characters of a request are tokenized: the prompt's once for each text choice, and all others."""
    choices = [choice for choice in params.choices or () if isinstance(choice, str)]
    others = (params.prediction, *params.bad_words, *choices)
    size = len(prompt) * max(len(choices), 1) if isinstance(prompt, str) else 0
    return size + sum(len(text) for text in others if isinstance(text, str))
