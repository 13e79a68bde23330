"""Checks of prompts and parameters, and the requests made of them."""

import itertools
import logging
import random
import secrets
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from specdec.config import EngineConfig
from specdec.core.choices import Choices
from specdec.core.detokenizer import Detokenizer
from specdec.core.lora_request import LoadedAdapter
from specdec.core.request import Request, RequestGroup
from specdec.core.sampling_params import SamplingParams
from specdec.core.stop_strings import special_in_stops, stop_tokens
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.draft_heads.drafting.chains import ChainRates, ChainSource
from specdec.draft_heads.drafting.ngram_chains import NGramChains
from specdec.draft_heads.drafting.predicted_text import PredictedText
from specdec.draft_heads.drafting.structured_drafts import ForcedText
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.engine.choice_prompts import with_choice_tokens
from specdec.engine.prompts import PlainPrompt, Prompt, as_list, read_prompt
from specdec.kernels.settings import MAX_WHOLE, check_text, whole_number
from specdec.models.checkpoint import has_tokenizer
from specdec.models.generation_config import GenerationConfig
from specdec.models.gguf_file import is_gguf
from specdec.models.grammar_compiler import GrammarCompiler
from specdec.models.tokenizer import Tokenizer
from specdec.verify.grammar_state import GrammarState
from specdec.verify.sampling import Sampling

_TOKEN = "a prompt token"
# Half of a surrogate pair, which a salt cannot hold: no request can name another's adapter in its salt.
_NOT_IN_SALTS = "\ud800"

logger = logging.getLogger(__name__)


@dataclass
class RequestMaker:
    """Makes requests that a model can serve. It needs the files beside the model's weights only.

    Attributes:
        config: the engine's settings.
        model: the target's sizes.
        tokenizer: None for a model without one, whose prompts must be token ids.
        generation_config: the model's end tokens, the tokenizer's among them, and default sampling parameters.
        max_model_len: limit of a request's tokens, prompt included.
        draft_context: number of tokens from which on the draft model drafts nothing for a request.
        draft_identity: stands for a head that has replaced the one of the start. It enters the cache salts of requests,
            so that they do not share prefixes whose features and entries are another head's.
    """

    config: EngineConfig
    model: LlamaConfig
    tokenizer: Tokenizer | None
    generation_config: GenerationConfig
    max_model_len: int
    draft_context: int = sys.maxsize
    draft_identity: str | None = None
    _has_warned: bool = False
    _ngram_rates: ChainRates = field(default_factory=ChainRates)
    _prediction_rates: ChainRates = field(default_factory=ChainRates)
    _forced_rates: ChainRates = field(default_factory=ChainRates)
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    @classmethod
    def read(cls, config: EngineConfig, model: LlamaConfig) -> "RequestMaker":
        """Read the tokenizer and generation_config.json of the target's folder.

        Raises:
            CheckpointError: a file that cannot be read.
            ValueError: `max_model_len` is more than the model's positions.
        """
        tokenizer, named = None, config.tokenizer or config.model
        if config.tokenizer is not None or has_tokenizer(config.model):
            tokenizer = Tokenizer(named)
        context = config.context(model.max_position)
        generation = GenerationConfig.read(config.model)
        # A GGUF file names all its end tokens, and transformers (5.17) may take another token for it.
        if tokenizer is not None and not is_gguf(named):
            generation = _with_tokenizers_end(generation, tokenizer, model.vocab_size)
        return cls(config, model, tokenizer, generation, context)

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ValueError: a model without one.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model}: no tokenizer.json; give prompts as token ids")
        return self.tokenizer

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens after which the model's output ends."""
        return self.generation_config.end_tokens

    def default_params(self) -> SamplingParams:
        """Return the parameters of the checkpoint's generation_config.json, with defaults for the others."""
        return SamplingParams(**self.generation_config.params)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins.

        Raises:
            ValueError: see `LLM.chat_prompt`.
        """
        text = self.chat_text(messages, template_arguments)
        return self.need_tokenizer().encode(text, add_special_tokens=False)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]) -> str:
        """Return the text of a conversation with its special tokens, up to where the answer begins.

        Raises:
            ValueError: see `LLM.chat_prompt`.
        """
        tokenizer = self.need_tokenizer()
        if not tokenizer.has_chat_template and template_arguments.get("chat_template") is None:
            raise ValueError(f"{self.config.model}: the tokenizer has no chat template; give the prompt as it is")
        plain = tokenizer.chat_messages(messages, **template_arguments)
        return tokenizer.chat_text(plain, **template_arguments)

    def chat_choices(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, template_arguments: Mapping[str, Any]
    ) -> tuple[PlainPrompt, SamplingParams]:
        """Return the tokens of a conversation, and parameters with the tokens of text choices that continue it.

        Raises:
            ValueError: see `LLM.chat_prompt`.
        """
        text = self.chat_text(messages, template_arguments)
        return with_choice_tokens(text, params, self.tokenizer, add_special_tokens=False)

    def check(self, prompt: PlainPrompt, params: SamplingParams, priority: int, cache_salt: str | None) -> list[int]:
        """Check a prompt and its parameters, their choices as token ids; return the prompt's tokens.

        Raises:
            ValueError: see `LLM.new_group`.
        """
        if cache_salt is not None:
            check_text("cache_salt", cache_salt)
        if abs(whole_number("priority", priority)) > MAX_WHOLE:
            raise ValueError(f"priority is {priority}; it must be between -2^63 and 2^63")
        if params.structured_outputs is not None:
            self.check_form(params.structured_outputs)
        tokens = self._tokens(prompt)
        vocab = self.model.vocab_size
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        if bad := [token for token in tokens if not 0 <= token < vocab]:
            raise ValueError(f"prompt token {bad[0]} is outside the vocabulary of {vocab}")
        tokens = self._truncated(tokens, params.truncate_prompt_tokens)
        if len(tokens) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, and the context is {self.max_model_len}; shorten it"
            )
        params.check_tokens(vocab)
        longest = max(map(len, params.choices or ()), default=0)
        if len(tokens) + longest > self.max_model_len:
            raise ValueError(
                f"choices holds one of {longest} tokens, the prompt has {len(tokens)}, and the context is "
                f"{self.max_model_len}; shorten one of them"
            )
        # The first output token comes without a draft.
        is_long = params.speculation.enabled and len(tokens) + 1 >= self.draft_context
        if is_long and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"a prompt of {len(tokens)} tokens gets no drafts: the head drafts for requests of fewer than "
                f"{self.draft_context} tokens (shown once)"
            )
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(f"{name} needs a tokenizer, and the model's folder has none; use token ids")
        if isinstance(params.prediction, str) and self.tokenizer is None:
            raise ValueError("prediction needs a tokenizer, and the model's folder has none; give token ids")
        return tokens

    def check_form(self, form: StructuredOutputsParams) -> None:
        """Refuse a structured output that is too large, before anything is made of it.

        Raises:
            ValueError: so, or a model without a tokenizer.
        """
        most, _ = self.config.structured_max_bytes, self.grammars
        if form.num_bytes > most:
            raise ValueError(
                f"structured_outputs.{form.form} has {form.num_bytes} bytes, more than structured_max_bytes, {most}; "
                "make it smaller, or start the engine with a larger one"
            )

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiler of the grammars of structured outputs.

        Raises:
            ValueError: a model without a tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and the model's folder has none; leave it out")
        is_shared = self.config.tensor_parallel_size > 1
        return GrammarCompiler(
            self.tokenizer,
            self.model.vocab_size,
            self.end_tokens,
            cache_bytes=self.config.structured_cache_bytes,
            is_shared=is_shared,
        )

    def group(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        adapter: LoadedAdapter | None = None,
    ) -> RequestGroup:
        """Make the requests of a prompt, one per sample, and compile their grammar. They are not queued yet.

        Args:
            adapter: of the target, for these requests.

        Raises:
            ValueError: see `LLM.new_group`.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is {params!r:.60}; it must be SamplingParams")
        # The caller may assign to its own afterwards.
        params = copy(params)
        content, text, cache_salt = read_prompt(prompt, cache_salt)
        content, params = with_choice_tokens(content, params, self.tokenizer)
        tokens = self.check(content, params, priority, cache_salt)
        longest, choices = self.max_model_len, None
        if params.choices is not None:
            choices = Choices([[int(token) for token in choice] for choice in params.choices])
            # Its tokens are those of the prompt alone, and a choice's nodes have entries behind them.
            longest = len(tokens) + choices.most_nodes + 1
        elif params.max_tokens is not None:
            longest = min(longest, len(tokens) + params.max_tokens)
        ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.end_tokens)
        backend = self.tokenizer.backend if self.tokenizer and params.detokenize else None
        special_stops = special_in_stops(backend, params.stop_strings) if backend is not None else {}
        ends |= stop_tokens(special_stops, params.stop_strings)
        seed = self._new_seed() if params.seed is None else params.seed
        group_id = str(next(self._ids))
        cached_samples: dict[Request, None] = {}
        predicted = self._predicted(params)
        grammars: list[GrammarState | None] = [None] * params.n
        if params.structured_outputs is not None:
            grammar = self.grammars.compile(params.structured_outputs)
            grammars = [self.grammars.state(grammar, len(tokens), ends) for _ in grammars]
        requests = [
            Request(
                request_id=f"{group_id}-{index}",
                token_ids=list(tokens),
                num_prompt=len(tokens),
                # The prompt is scored once.
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                sampling=self._sampling(params, ends, seed, index, grammars[index]),
                max_length=longest,
                end_tokens=ends,
                detokenizer=Detokenizer(
                    backend,
                    params.stop_strings,
                    params.include_stop_str_in_output,
                    params.skip_special_tokens,
                    params.spaces_between_special_tokens,
                    tokens,
                    params.kept_special_tokens or (),
                    special_stops,
                ),
                priority=int(priority),
                cache_salt=self._salt(cache_salt, adapter),
                adapter=adapter,
                cached_samples=cached_samples,
                choices=choices,
                least_nodes=choices.least_nodes if choices is not None else 0,
            )
            for index in range(params.n)
        ]
        for request in requests:
            self._add_sources(request, predicted)
        return RequestGroup(group_id, text, tokens, requests)

    def _salt(self, cache_salt: str | None, adapter: LoadedAdapter | None) -> str | None:
        """Return what sets a request's blocks apart: its own salt, and what else their content depends on."""
        extra = [] if self.draft_identity is None else [f"draft {self.draft_identity}"]
        if adapter is not None:
            extra.append(f"lora {adapter.identity}")
        if not extra:
            return cache_salt
        return _NOT_IN_SALTS.join(["", *extra, *([] if cache_salt is None else [cache_salt])])

    @cached_property
    def _seeds(self) -> random.Random:
        return random.Random(self.config.seed)

    def _new_seed(self) -> int:
        """Return the seed of a request that brings none."""
        return secrets.randbits(63) if self.config.seed is None else self._seeds.getrandbits(63)

    def _predicted(self, params: SamplingParams) -> list[int]:
        """Return the tokens of the predicted text, none without one."""
        if isinstance(params.prediction, str):
            return self.need_tokenizer().encode(params.prediction, add_special_tokens=False)
        return [] if params.prediction is None else [int(token) for token in params.prediction]

    def _add_sources(self, request: Request, predicted: list[int]) -> None:
        """Give a request its sources of chains: first what its grammar forces, then the predicted text."""
        sources: list[ChainSource] = []
        if request.choices is not None:
            return
        if request.sampling.grammar is not None:
            rates = ChainRates(self._forced_rates)
            sources.append(ForcedText(request.sampling.grammar, rates, self.grammars.encode))
        if predicted:
            rates = ChainRates(self._prediction_rates)
            request.prediction = PredictedText(predicted, request.num_prompt, rates)
            sources.append(request.prediction)
        if self.config.ngrams:
            sources.append(NGramChains(self.config.shape.branching, ChainRates(self._ngram_rates)))
        request.chain_sources = sources

    def _tokens(self, prompt: PlainPrompt) -> list[int]:
        if isinstance(prompt, str):
            check_text("the prompt", prompt)
            return self.need_tokenizer().encode(prompt)
        ids = as_list(prompt)
        if not isinstance(ids, Sequence) or isinstance(ids, bytes):
            raise ValueError(f"the prompt is {prompt!r}; it must be text or a list of token ids")
        # Most prompts are long lists of plain numbers.
        return list(ids) if all(type(token) is int for token in ids) else [whole_number(_TOKEN, token) for token in ids]

    def _truncated(self, tokens: list[int], most: int | None) -> list[int]:
        """Return the last tokens of a prompt, as many as `SamplingParams.truncate_prompt_tokens` says."""
        if most is None:
            return tokens
        return tokens[-(self.max_model_len - 1 if most == -1 else most) :]

    def _sampling(
        self, params: SamplingParams, ends: frozenset[int], seed: int, index: int, grammar: GrammarState | None
    ) -> Sampling:
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
            grammar=grammar,
        )


def _with_tokenizers_end(generation: GenerationConfig, tokenizer: Tokenizer, vocab_size: int) -> GenerationConfig:
    """Add the tokenizer's end token, as vLLM does: chat models often name that of a turn only there."""
    end, known = tokenizer.end_token, generation.end_tokens
    if end is None or end in known or end >= vocab_size:
        return generation
    others = ", ".join(f"{token} ({tokenizer.backend.id_to_token(token)})" for token in sorted(known)) or "none"
    logger.info(
        f"end tokens: the tokenizer's, {end} ({tokenizer.backend.id_to_token(end)}), besides those of the model's "
        f"configuration: {others}"
    )
    return replace(generation, end_tokens=known | {end})
