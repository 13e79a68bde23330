"""Checks of prompts and parameters, and the requests made of them."""

import itertools
import logging
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Number
from pathlib import Path
from typing import Any

from specdec.core.detokenizer import Detokenizer
from specdec.core.request import Request, RequestGroup
from specdec.core.sampling_params import SamplingParams
from specdec.kernels.settings import check_text, whole_number
from specdec.models.tokenizer import Tokenizer
from specdec.verify.sampling import Sampling

Prompt = str | Sequence[int]
_TOKEN = "a prompt token"

logger = logging.getLogger(__name__)


def prompt_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list of prompts.

    Raises:
        ValueError: neither text nor a sequence.
    """
    batch = _as_list(prompts)
    if isinstance(batch, bytes) or not isinstance(batch, Sequence):
        raise ValueError(f"prompts is {prompts!r}; it must be text or token ids, or a list of these")
    return [batch] if isinstance(batch, str) or (batch and isinstance(batch[0], Number)) else list(batch)


def _as_list(value: Any) -> Any:
    """Return arrays and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass
class RequestMaker:
    """Makes requests that a model can serve.

    Attributes:
        tokenizer: None for a model without one, whose prompts must be token ids.
        vocab_size: number of token ids.
        max_model_len: limit of a request's tokens, prompt included.
        end_tokens: the model's end tokens.
        folder: the model's folder, for messages.
        draft_context: number of tokens from which on a request gets no drafts.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    end_tokens: frozenset[int]
    folder: Path
    draft_context: int = sys.maxsize
    _has_warned: bool = False
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ValueError: a model without one.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.folder}: no tokenizer.json; give prompts as token ids")
        return self.tokenizer

    def group(self, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str | None) -> RequestGroup:
        """Make the requests of a prompt, one per sample. They are not queued yet.

        Raises:
            ValueError: see `LLM.new_group`.
        """
        if cache_salt is not None:
            check_text("cache_salt", cache_salt)
        priority = whole_number("priority", priority)
        tokens = self._tokens(prompt)
        vocab = self.vocab_size
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        if bad := [token for token in tokens if not 0 <= token < vocab]:
            raise ValueError(f"prompt token {bad[0]} is outside the vocabulary of {vocab}")
        if len(tokens) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, and the context is {self.max_model_len}; shorten it"
            )
        params.check_tokens(vocab)
        # The first output token comes without a draft.
        if len(tokens) + 1 >= self.draft_context and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"a prompt of {len(tokens)} tokens gets no drafts: the head drafts for requests of fewer than "
                f"{self.draft_context} tokens (shown once)"
            )
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(f"{name} needs a tokenizer, and the model's folder has none; use token ids")
        longest = self.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(tokens) + params.max_tokens)
        ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.end_tokens)
        backend = self.tokenizer.backend if self.tokenizer else None
        seed = secrets.randbits(63) if params.seed is None else params.seed
        group_id = str(next(self._ids))
        cached_samples: dict[Request, None] = {}
        requests = [
            Request(
                request_id=f"{group_id}-{index}",
                token_ids=list(tokens),
                num_prompt=len(tokens),
                # The prompt is scored once.
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                sampling=self._sampling(params, ends, seed, index),
                max_length=longest,
                end_tokens=ends,
                detokenizer=Detokenizer(
                    backend, params.stop_strings, params.include_stop_str_in_output, params.skip_special_tokens
                ),
                priority=priority,
                cache_salt=cache_salt,
                cached_samples=cached_samples,
            )
            for index in range(params.n)
        ]
        return RequestGroup(group_id, prompt if isinstance(prompt, str) else None, tokens, requests)

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            check_text("the prompt", prompt)
            return self.need_tokenizer().encode(prompt)
        ids = _as_list(prompt)
        if not isinstance(ids, Sequence) or isinstance(ids, bytes):
            raise ValueError(f"the prompt is {prompt!r}; it must be text or a list of token ids")
        # Most prompts are long lists of plain numbers.
        return list(ids) if all(type(token) is int for token in ids) else [whole_number(_TOKEN, token) for token in ids]

    def _sampling(self, params: SamplingParams, ends: frozenset[int], seed: int, index: int) -> Sampling:
        allowed = params.allowed_token_ids
        return Sampling(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in (params.logit_bias or {}).items()),
            allowed_token_ids=None if allowed is None else tuple(sorted(map(int, set(allowed)))),
            bad_words=self.tokenizer.encode_words(params.bad_words) if self.tokenizer else (),
            min_tokens=params.min_tokens,
            end_tokens=tuple(sorted(ends)),
            seed=seed,
            sample_index=index,
        )
