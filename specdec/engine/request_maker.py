"""Checks of prompts and parameters, and the requests made of them."""

import itertools
import logging
import random
import secrets
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from specdec.config import EngineConfig
from specdec.core.choices import Choices
from specdec.core.commands import Add
from specdec.core.engine_stats import SourceCount
from specdec.core.errors import wrong
from specdec.core.lora_request import LoadedAdapter
from specdec.core.reasoning import reasoning_parser
from specdec.core.request import Request, RequestGroup
from specdec.core.request_limits import choice_too_long, prompt_too_long
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.chain_sources import SUFFIX, MakeSource, prepared_sources
from specdec.draft_heads.drafting.chains import ChainRates, ChainSource
from specdec.draft_heads.drafting.predicted_text import PredictedText
from specdec.draft_heads.drafting.stored_chains import DraftStore
from specdec.draft_heads.drafting.structured_drafts import ForcedText
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.engine.prompts import PlainPrompt, as_list
from specdec.engine.request_texts import RequestTexts, Words
from specdec.kernels.types.settings import MAX_WHOLE, ParameterError, check_text, whole_number
from specdec.models.checkpoint import has_tokenizer
from specdec.models.generation_config import GenerationConfig
from specdec.models.grammar_compiler import GrammarCompiler
from specdec.models.reasoning_marks import thinking_marks
from specdec.models.tokenizer import Tokenizer
from specdec.text.detokenizer import Detokenizer
from specdec.text.stop_strings import StopStrings, special_in_stops, stop_tokens
from specdec.verify.grammar_state import Grammar, GrammarState
from specdec.verify.sampling import Sampling
from specdec.verify.thinking_state import ThinkingMarks, ThinkingState

# Half of a surrogate pair, which a salt cannot hold: no request can name another's adapter in its salt.
_NOT_IN_SALTS = "\ud800"
# Characters of a salt, which is hashed with the first block of each request.
_LONGEST_SALT = 1024
# Lists of stop strings that are remembered, each of megabytes at most.
_MOST_STOPS = 8

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
        store: texts of earlier requests; None where nothing is drafted from them.
        makes_texts: whether requests need their text for more than stop strings; not on ranks beside the first.
    """

    config: EngineConfig
    model: LlamaConfig
    tokenizer: Tokenizer | None
    generation_config: GenerationConfig
    max_model_len: int
    draft_context: int = sys.maxsize
    draft_identity: str | None = None
    store: DraftStore | None = None
    makes_texts: bool = True
    _has_warned: bool = False
    _rates: dict[str, ChainRates] = field(default_factory=lambda: defaultdict(ChainRates))
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    @classmethod
    def read(cls, config: EngineConfig, model: LlamaConfig) -> "RequestMaker":
        """Read the tokenizer and the end tokens and default sampling parameters of the target.

        Raises:
            CheckpointError: a file that cannot be read.
            ValueError: `max_model_len` is more than the model's positions, or a `reasoning_parser` whose marks the
                model does not have.
        """
        tokenizer = None
        if config.tokenizer is not None or has_tokenizer(config.model):
            tokenizer = Tokenizer(config.tokenizer or config.model)
        context = config.context(model.max_position)
        generation = GenerationConfig.read(config.model)
        if tokenizer is None and generation.params.pop("stop", None) is not None:
            logger.warning("generation_config.json: stop_strings is not used, for there is no tokenizer")
        if tokenizer is not None:
            generation = _with_tokenizers_end(generation, tokenizer, model.vocab_size)
        maker = cls(config, model, tokenizer, generation, context)
        # A parser that does not fit the model is refused at once.
        _ = maker.thinking
        return maker

    @cached_property
    def texts(self) -> RequestTexts:
        """Makes tokens of texts."""
        return RequestTexts(self.tokenizer, self.config.limits, self.config.model, self.max_model_len)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens after which the model's output ends."""
        return self.generation_config.end_tokens

    def default_params(self) -> SamplingParams:
        """Return the parameters of the checkpoint's generation_config.json, with defaults for the others."""
        return SamplingParams(**self.generation_config.params)

    def add(self, prompt: PlainPrompt, params: SamplingParams, priority: int = 0, cache_salt: str | None = None) -> Add:
        """Check a prompt and its parameters, and return the command that runs it. Nothing checks them again.

        Raises:
            ValueError: a prompt that is empty, outside the vocabulary, or too long; a parameter that the model does
                not support.
        """
        if not isinstance(params, SamplingParams):
            raise wrong("sampling_params", f"is {params!r:.60}; it must be SamplingParams")
        # The caller may assign to its own afterwards.
        prompt, params = self.texts.with_tokens(prompt, copy(params))
        return Add(self._checked(prompt, params, priority, cache_salt), params, int(priority), cache_salt)

    def _checked(self, prompt: PlainPrompt, params: SamplingParams, priority: int, cache_salt: str | None) -> list[int]:
        """Return the prompt's tokens."""
        if cache_salt is not None:
            check_text("cache_salt", cache_salt)
            if len(cache_salt) > _LONGEST_SALT:
                raise wrong("cache_salt", f"has {len(cache_salt)} characters; it may have at most {_LONGEST_SALT}")
        if abs(whole_number("priority", priority)) > MAX_WHOLE:
            raise wrong("priority", f"is {priority}; it must be between -2^63 and 2^63")
        if (form := params.structured_outputs) is not None:
            # Refused before anything is made of it; so is any form without a tokenizer.
            most, _ = self.config.structured_max_bytes, self.grammars
            if form.num_bytes > most:
                raise ParameterError(
                    "structured_outputs",
                    f"{form.shown_form} has {form.num_bytes} bytes, more than structured_max_bytes, {most}; "
                    "make it smaller, or start the engine with a larger one",
                )
        for name in ("thinking_token_budget", "reasoning_ended"):
            if getattr(params, name) is not None and self.thinking is None:
                raise wrong(name, f"is {getattr(params, name)}; it needs the engine's reasoning_parser: leave it out")
        tokens = self._tokens(prompt, is_truncated=params.truncate_prompt_tokens is not None)
        vocab = self.model.vocab_size
        if not tokens:
            raise ParameterError("prompt", "the prompt is empty; give at least one token")
        if min(tokens) < 0 or max(tokens) >= vocab:
            bad = next(token for token in tokens if not 0 <= token < vocab)
            raise wrong("prompt", f"token {bad} is outside the vocabulary of {vocab}")
        if (kept := params.truncate_prompt_tokens) is not None:
            tokens = tokens[-(self.max_model_len - 1 if kept == -1 else kept) :]
        self._check_length(len(tokens))
        params.check_tokens(vocab)
        longest = max(map(len, params.choices or ()), default=0)
        if len(tokens) + longest > self.max_model_len:
            raise choice_too_long(f"of {longest} tokens, the prompt has {len(tokens)}", self.max_model_len)
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise wrong(name, "needs a tokenizer, and the model's folder has none; use token ids")
        self.texts.bad_words(params)
        return tokens

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiler of the grammars of structured outputs.

        Raises:
            ValueError: a model without a tokenizer.
        """
        if self.tokenizer is None:
            raise wrong("structured_outputs", "needs a tokenizer, and the model's folder has none; leave it out")
        return GrammarCompiler(self.tokenizer, self.model.vocab_size, self.end_tokens)

    @cached_property
    def thinking(self) -> ThinkingMarks | None:
        """Marks of the model's thinking, None without a `reasoning_parser`."""
        name = self.config.reasoning_parser
        return None if name is None else thinking_marks(reasoning_parser(name), self.tokenizer, self.model.vocab_size)

    def compile(self, add: Add) -> Grammar | None:
        """Return the compiled grammar of a request, which takes a second for large forms; None without one.

        It is found again by `group` for as long as it is held.

        Raises:
            ValueError: an invalid schema, regular expression or grammar.
        """
        form = add.params.structured_outputs
        return None if form is None else self.grammars.compile(form)

    def group(self, add: Add, adapter: LoadedAdapter | None = None) -> RequestGroup:
        """Make the requests of a prompt, one per sample, and compile their grammar. They are not queued yet.

        Args:
            adapter: that of `add`, loaded.

        Raises:
            ValueError: a grammar that cannot be compiled.
        """
        params, tokens, cache_salt = add.params, add.prompt, add.cache_salt
        self._warn_of_no_drafts(add)
        longest, choices = self.max_model_len, None
        if params.choices is not None:
            choices = Choices([[int(token) for token in choice] for choice in params.choices])
            # Its tokens are those of the prompt alone, and a choice's nodes have entries behind them.
            longest = len(tokens) + choices.most_nodes + 1
        elif params.max_tokens is not None:
            longest = min(longest, len(tokens) + params.max_tokens)
        ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.end_tokens)
        # A tokenizer may have more tokens than the model, which never generates them.
        vocab = self.model.vocab_size
        bad_words = tuple(word for word in self.texts.bad_words(params) if max(word) < vocab)
        stops = self._stops(params.stop_strings)
        needs_text = params.detokenize and (self.makes_texts or params.stop_strings)
        backend = self.tokenizer.backend if self.tokenizer and needs_text else None
        special_stops = special_in_stops(backend, stops) if backend is not None else {}
        ends |= frozenset(token for token in stop_tokens(special_stops, stops) if token < vocab)
        seed = self.seeds.getrandbits(63) if params.seed is None else params.seed
        sampling = _sampling(params, bad_words, ends, seed)
        group_id = str(next(self._ids))
        cached_samples: dict[Request, None] = {}
        predicted = [int(token) for token in params.prediction or ()][: self.max_model_len]
        grammar = self.compile(add)
        requests = [
            Request(
                request_id=f"{group_id}-{index}",
                token_ids=list(tokens),
                num_prompt=len(tokens),
                # The prompt is scored once.
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                sampling=replace(
                    sampling, sample_index=index, grammar=self._output_state(params, tokens, grammar, ends)
                ),
                max_length=longest,
                end_tokens=ends,
                detokenizer=Detokenizer(
                    backend,
                    stops,
                    params.include_stop_str_in_output,
                    params.skip_special_tokens,
                    params.spaces_between_special_tokens,
                    tokens,
                    params.kept_special_tokens or (),
                    special_stops,
                    None if self.tokenizer is None else self.tokenizer.whole_tokens,
                ),
                priority=add.priority,
                client=add.client,
                cache_salt=self._salt(cache_salt, adapter),
                adapter=adapter,
                cached_samples=cached_samples,
                choices=choices,
                least_nodes=choices.least_nodes if choices is not None else 0,
                is_traced=add.trace,
            )
            for index in range(params.n)
        ]
        for request in requests:
            self._add_sources(request, predicted, cache_salt)
        return RequestGroup(group_id, add.text, tokens, requests)

    def _output_state(
        self, params: SamplingParams, prompt: Sequence[int], grammar: Grammar | None, ends: frozenset[int]
    ) -> GrammarState | ThinkingState | None:
        """Return the state of a new request's output, None for one of any tokens."""
        answer = None if grammar is None else self.grammars.state(grammar, len(prompt), ends)
        budget, marks = params.thinking_token_budget, self.thinking
        if marks is None or (answer is None and budget is None):
            return answer
        last = marks.last(prompt)
        if last == marks.end if params.reasoning_ended is None else params.reasoning_ended:
            return answer
        is_open = last == marks.start
        return ThinkingState(marks, len(prompt), self.model.vocab_size, is_open=is_open, budget=budget, grammar=answer)

    def _warn_of_no_drafts(self, add: Add) -> None:
        """Say once that a prompt is too long for the draft model."""
        # The first output token comes without a draft.
        is_long = add.params.speculation.enabled and len(add.prompt) + 1 >= self.draft_context
        if is_long and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"a prompt of {len(add.prompt)} tokens gets no drafts: the head drafts for requests of fewer than "
                f"{self.draft_context} tokens (shown once)"
            )

    def _salt(self, cache_salt: str | None, adapter: LoadedAdapter | None) -> str | None:
        """Return what sets a request's blocks apart: its own salt, and what else their content depends on."""
        extra = [] if self.draft_identity is None else [f"draft {self.draft_identity}"]
        if adapter is not None:
            extra.append(f"lora {adapter.identity}")
        if not extra:
            return cache_salt
        return _NOT_IN_SALTS.join(["", *extra, *([] if cache_salt is None else [cache_salt])])

    @cached_property
    def seeds(self) -> random.Random:
        """Source of the seeds of requests that bring none."""
        return random.Random(secrets.randbits(256) if self.config.seed is None else self.config.seed)

    @cached_property
    def _stops(self) -> Callable[[tuple[str, ...]], StopStrings]:
        """Makes the stop strings of a request. Those of the last ones are remembered: all its prompts have the same."""
        return lru_cache(_MOST_STOPS)(StopStrings)

    @cached_property
    def _named_sources(self) -> dict[str, MakeSource]:
        """Makers of the draft sources that the settings name, by name."""
        return prepared_sources(self.config.chains, self.config.shape, self.config.draft_options)

    def source_counts(self) -> dict[str, SourceCount]:
        """Return the tokens that each draft source without a model proposed, and how many were right, by name."""
        found = self._rates if self.store is None else {**self._rates, "store": self.store.rates}
        return {name: SourceCount(rates.tokens, rates.right) for name, rates in found.items()}

    def _add_sources(self, request: Request, predicted: list[int], cache_salt: str | None) -> None:
        """Give a request its sources of chains: first what its grammar forces, then the predicted text."""
        sources: list[ChainSource] = []
        if request.choices is not None:
            return
        if request.sampling.grammar is not None:
            rates = ChainRates(self._rates["grammar"])
            sources.append(ForcedText(request.sampling.grammar, rates, self.grammars.encode))
        if predicted:
            rates = ChainRates(self._rates["prediction"])
            request.prediction = PredictedText(predicted, request.num_prompt, rates)
            sources.append(request.prediction)
        for name, make in self._named_sources.items():
            own = make(ChainRates(self._rates[name]))
            if name == SUFFIX and self.store is not None:
                adapter = None if request.adapter is None else request.adapter.identity
                client = None if self.config.draft_store_shared else request.client
                own = request.stored = self.store.open((cache_salt, adapter, client), own)
            sources.append(own)
        request.chain_sources = sources

    def _tokens(self, prompt: PlainPrompt, is_truncated: bool) -> list[int]:
        if isinstance(prompt, str):
            return self.texts.encode([prompt], may_be_longer=is_truncated)[0]
        ids = as_list(prompt)
        if not isinstance(ids, Sequence) or isinstance(ids, bytes):
            raise ParameterError("prompt", f"the prompt is {prompt!r}; it must be text or a list of token ids")
        if not is_truncated:
            self._check_length(len(ids))
        # Most prompts are long lists of plain numbers.
        return (
            list(ids)
            if all(type(token) is int for token in ids)
            else [whole_number("a prompt token", token, "prompt") for token in ids]
        )

    def _check_length(self, count: int) -> None:
        if count >= self.max_model_len:
            raise prompt_too_long(count, self.max_model_len)


def _sampling(params: SamplingParams, bad_words: Words, ends: frozenset[int], seed: int) -> Sampling:
    """Return the sampling parameters that all samples of a request have in common."""
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
        bad_words=bad_words,
        min_tokens=params.min_tokens,
        end_tokens=tuple(sorted(ends)),
        seed=seed,
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
