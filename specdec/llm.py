"""The Python API."""

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

import torch

from specdec.config import AUTO
from specdec.core.device import DTYPES, on_device
from specdec.core.engine_stats import EngineStats
from specdec.core.output_kind import ShownStates
from specdec.core.outputs import BeamSearchOutput, RequestOutput
from specdec.core.progress import progress_bar
from specdec.core.request import RequestGroup
from specdec.core.sampling_params import BeamSearchParams, SamplingParams
from specdec.engine.beam_search import BeamRequest, BeamSearch, run_searches
from specdec.engine.draft_loader import load_drafts, release_output_weights
from specdec.engine.engine_builder import EngineBuilder
from specdec.engine.request_maker import Prompt, RequestMaker, prompt_batch
from specdec.engine.resolved_config import resolved_config
from specdec.engine.shared_engine import SharedEngine
from specdec.engine.vllm_keywords import LLMKeywords, own_settings
from specdec.kernels.kernel_set import choose_kernels
from specdec.kernels.settings import check_call
from specdec.models.llama import load_llama
from specdec.verify.noise import GumbelNoise

logger = logging.getLogger(__name__)


class LLM:
    """A target model with a draft head.

    llm = LLM(draft="eagle")
    llm.generate(["I would like to find a restaurant."], SamplingParams(temperature=0, max_tokens=64))

    Calls may interleave, and may come from several threads: their requests share the engine's steps.

    Args:
        model: the target: a checkpoint folder, a GGUF file, or `org/name` on the Hugging Face hub; None for the one
            that a speculators head names, or else the built-in demo model.
        draft: "auto" for the head that the model's config.json or card names, and "ngram" if there is none; "eagle" for
            the demo model's own head; a head or a small model with the target's tokenizer by its folder or its name on
            the hub; "ngram" for prompt lookup; None for plain decoding. One model and "ngram" draft together:
            "eagle,ngram". A speculators head given as `model` drafts for the target that it names.
        settings: keywords of `LLMSettings`; `EngineConfig` and `SchedulerConfig` describe them and have the defaults.
            `shape` is the device's default where it is None, and `draft_vocab` may be a number or a file. Those of
            vLLM's `LLM` are in `VLLMKeywords`.

    Attributes:
        config: the settings, with nothing left open.

    Raises:
        CheckpointError: a checkpoint that cannot be loaded or downloaded; the message names what is wrong.
        ValueError: an unknown setting, or one outside its range.
    """

    @check_call()
    def __init__(
        self, model: str | Path | None = None, draft: str | Path | None = AUTO, **settings: Unpack[LLMKeywords]
    ) -> None:
        draft, own = own_settings(model, draft, settings)
        self.config = config = resolved_config(model, draft, own)
        folder, device, dtype = config.model, torch.device(config.device), DTYPES[config.dtype]
        began = time.perf_counter()
        with on_device(device):
            kernels = choose_kernels(
                config.kernels, device, dtype, GumbelNoise(device), config.threads, config.quantization
            )
            if config.quantization == "q8":
                logger.warning("quantization q8: 8-bit weights: the model's outputs change")
            self.model = load_llama(folder, dtype, device, kernels)
            size = f"{self.model.num_parameters:,} parameters"
            how = f"{config.dtype} on {device}, {kernels.name} kernels"
            logger.info("target %s: %s, %s, loaded in %.1f s", folder, size, how, time.perf_counter() - began)
            self._requests = RequestMaker.read(config, self.model.config)
            self.tokenizer, self.max_model_len = self._requests.tokenizer, self._requests.max_model_len
            self.generation_config = self._requests.generation_config
            special = self.tokenizer.special_tokens if self.tokenizer else frozenset()
            drafts = load_drafts(config, self.model, kernels, self.generation_config.end_tokens | special)
            if config.quantization != "none":
                release_output_weights(self.model, drafts)
            logger.info("drafts: %s, %s", config.sources or "none", config.shape)
            self.engine = EngineBuilder(config, self.model, drafts, kernels).build()
        logger.info("ready after %.1f s", time.perf_counter() - began)
        self._shared = SharedEngine(self.engine)
        if config.draft is not None and self.engine.scheduler.draft_budget is not None:
            self._requests.draft_context = self.engine.scheduler.draft_budget.context

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, all in one ragged batch, and return them in order.

        Args:
            prompts: strings or token-id lists.
            sampling_params: one for all, or one each.
            use_tqdm: show a progress bar where there are several prompts (the name is vLLM's).
            priority: one each, lower ones first, under the policy "priority".
            cache_salt: only prompts of the same salt share cached prefixes.

        Raises:
            ValueError: a prompt that is empty or leaves no room for a token; nothing has run then.
            QueueFullError: more prompts than `max_queued_requests`; nothing has run then.
        """
        groups = self._groups(prompts, sampling_params, priority, cache_salt)
        with progress_bar(len(groups), "generating", hidden=not use_tqdm) as advance:
            for finished in self._shared.run(groups, read=lambda group: group.finished):
                if finished:
                    advance()
        return [group.output() for group in groups]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
        trace: bool = False,
    ) -> Generator[RequestOutput]:
        """Run prompts like `generate`; yield a request's state after each step in which it got tokens.

        `segments` of a state is its new text; `SamplingParams.output_kind` says what else it holds. Closing the
        iterator aborts the requests that are not finished.

        Args:
            trace: let the outputs' `steps` hold all steps with their draft trees and accepted paths.
        """
        groups = self._groups(prompts, sampling_params, priority, cache_salt)
        if trace:
            for group in groups:
                group.start_trace()
        shown = {group.request_id: ShownStates(group.requests[0].params.output_kind) for group in groups}
        with closing(self._shared.run(groups, RequestGroup.output)) as states:
            for state in states:
                yield from shown[state.request_id].of(state)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.chat_prompt(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, cache_salt=cache_salt)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Search the most probable sequences after each prompt, all in one batch, without drafts.

        Tokens and scores are those of transformers' `generate` with `num_beams` of `params.beam_width`.

        Raises:
            ValueError: a prompt as in `generate`, or more beams than `max_num_seqs`; nothing has run then.
        """
        seats = self.config.scheduler.max_num_seqs
        if params.beam_width > seats:
            raise ValueError(f"beam_width is {params.beam_width}; it must be at most max_num_seqs, {seats}")
        # The `beam_width` best candidates of a beam can matter, and as many that do not end.
        most = params.beam_width + (0 if params.ignore_eos else len(self.end_tokens))
        step = SamplingParams(
            temperature=0,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            logprobs=min(most, self.model.config.vocab_size),
        )
        roots = [BeamRequest.of(group.requests[0]) for group in self._groups(prompts, step)]
        searches = [BeamSearch(self.engine, params, root) for root in roots]
        run_searches(self._shared, searches)
        return [search.output(self.tokenizer) for search in searches]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins.

        Args:
            template_arguments: variables of the chat template, such as `tools`.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        return self._requests.chat_prompt(messages, template_arguments)

    def _groups(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestGroup]:
        batch = prompt_batch(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.get_default_sampling_params()] * len(batch)
        else:
            params = list(sampling_params)
        if len(params) != len(batch):
            raise ValueError(f"{len(params)} sampling_params for {len(batch)} prompts; give one, or one each")
        priorities = [0] * len(batch) if priority is None else list(priority)
        if len(priorities) != len(batch):
            raise ValueError(f"{len(priorities)} priorities for {len(batch)} prompts; give one each")
        return [
            self.new_group(prompt, own, priority=rank, cache_salt=cache_salt)
            for prompt, own, rank in zip(batch, params, priorities, strict=True)
        ]

    def new_group(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, cache_salt: str | None = None
    ) -> RequestGroup:
        """Make the requests of a prompt, one per sample, checked and not yet queued.

        Args:
            priority: lower runs first, under the policy "priority".
            cache_salt: only requests of the same salt share cached prefixes.

        Raises:
            ValueError: a prompt that is empty, outside the vocabulary, or too long; a parameter that the model
                does not support.
        """
        return self._requests.group(prompt, params, priority, cache_salt)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens after which the model's output ends."""
        return self._requests.end_tokens

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of the checkpoint's generation_config.json, with defaults for the others."""
        return self._requests.default_params()

    def stats(self) -> EngineStats:
        """Return counts since the start, and the current state of the engine."""
        with self._shared.turn() as engine:
            return engine.scheduler.stats()
