"""The Python API."""

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from transformers import PreTrainedTokenizerBase

from specdec.building.build import build_engine
from specdec.building.host_memory import check_memory
from specdec.building.named_checkpoints import head_path
from specdec.building.ranks import ranks_of
from specdec.building.resolved_config import resolved_config
from specdec.building.vllm_keywords import FOREIGN_CALL, FOREIGN_SEARCH, LLMKeywords, own_settings
from specdec.config import AUTO
from specdec.core.commands import (
    Add,
    Control,
    EngineReply,
    GetStats,
    LoadAdapter,
    Stats,
    UnloadAdapter,
    Unloaded,
    UpdateDraft,
)
from specdec.core.engine_stats import EngineStats
from specdec.core.lora_request import LoRARequest
from specdec.core.metrics import Metric, engine_metrics
from specdec.core.out_of_memory import explained_shortage
from specdec.core.outputs import BeamSearchOutput, RequestOutput, ShownStates, SpeculationStats
from specdec.core.progress import progress_bar
from specdec.core.request import RequestGroup
from specdec.core.sampling_params import BeamSearchParams, SamplingParams
from specdec.engine.chat_tools import with_tools
from specdec.engine.prompts import Prompt, one_each, prompt_batch, read_prompt
from specdec.engine.request_maker import RequestMaker
from specdec.engine.request_ring import RequestRing
from specdec.engine.shared_engine import EngineCall, SharedEngine, run_searches
from specdec.kernels.types.settings import check_call
from specdec.models.llama import read_llama_config

T = TypeVar("T")
logger = logging.getLogger(__name__)
# An adapter for all prompts, or one or None each.
LoRARequests = LoRARequest | list[LoRARequest] | list[LoRARequest | None] | None


class LLM:
    """A target model with a draft head.

    llm = LLM(draft="eagle")
    llm.generate(["I would like to find a restaurant."], SamplingParams(temperature=0, max_tokens=64))

    Calls may interleave, and may come from several threads: their requests share the engine's steps. One lock guards
    the engine, and a call holds it for one step at a time, so no thread gets a second step while another waits. Which
    calls run together changes no token. `close`, or the end of a `with` block, gives up the model's memory.

    Args:
        model: the target: a checkpoint folder, a GGUF file, or `org/name` on the Hugging Face hub; None for the one
            that a speculators head names, or else the built-in demo model.
        draft: "auto" for the head that the model's config.json or card names, or else one that the repository's
            `heads/` has for it, and "ngram" if there is none; "eagle" (which is "eagle3") or "dspark" for the demo
            model's own heads; a head or a small model with the target's tokenizer by its folder or its name on the hub;
            "ngram" for prompt lookup; "suffix" for that and what followed the same tokens in earlier requests; None for
            plain decoding. One model and "ngram" or "suffix" draft together: "eagle,suffix". A speculators head given
            as `model` drafts for the target that it names.
        settings: keywords of `LLMSettings`; `EngineConfig` and `SchedulerConfig` describe them and have the defaults.
            `shape` may give some fields of a `DraftShape`; the others have the device's defaults. Those
            of vLLM's `LLM` are in `VLLMKeywords`.

    Attributes:
        config: the settings, with nothing left open.

    Raises:
        CheckpointError: a checkpoint that cannot be loaded or downloaded; the message names what is wrong.
        ValueError: an unknown setting, or one outside its range; or memory that the machine does not have.
    """

    @check_call()
    def __init__(
        self, model: str | Path | None = None, draft: str | Path | None = AUTO, **settings: Unpack[LLMKeywords]
    ) -> None:
        draft, own = own_settings(model, draft, settings)
        self.config = config = resolved_config(model, draft, own)
        check_memory(config)
        began = time.perf_counter()
        with RequestRing.of(config) as ring:
            self.request_maker = RequestMaker.read(config, read_llama_config(config.model))
            self.tokenizer, self.max_model_len = self.request_maker.tokenizer, self.request_maker.max_model_len
            self.generation_config = self.request_maker.generation_config
            with explained_shortage(), ranks_of(config) as ranks:
                self.engine = build_engine(config, ranks, self.request_maker)
        self.model = self.engine.worker.runner.model
        self.engine.ring = ring
        logger.info("ready after %.1f s", time.perf_counter() - began)
        self._shared = SharedEngine(self.engine)
        if config.draft is not None:
            self.request_maker.draft_context = self.engine.scheduler.draft_budget.context

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the model, its cache and all requests, after the running step.

        Calls that run in other threads, and all later ones, raise a ValueError.
        """
        self._shared.close()
        engine = self.__dict__.pop("engine", None)
        if engine is not None:
            engine.shutdown()
        self.__dict__.pop("model", None)

    @check_call(FOREIGN_CALL)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, all in one ragged batch, and return them in order.

        Args:
            prompts: strings, token-id lists, or dicts of these (`TextPrompt`, `TokensPrompt`).
            sampling_params: one for all, or one each.
            use_tqdm: show a progress bar where there are several prompts (the name is vLLM's; the bar is our own).
            lora_request: an adapter for all, or one or None each; needs `enable_lora`.
            priority: one each, lower ones first, under the policy "priority".
            cache_salt: only prompts of the same salt share cached prefixes.

        Raises:
            ValueError: a prompt that is empty or leaves no room for a token; nothing has run then.
            QueueFullError: more prompts than `max_queued_requests`, or adapters than `max_loras`; nothing has run then.
        """
        adds = self._adds(prompts, sampling_params, priority, cache_salt, lora_request)
        hidden, tree = not use_tqdm, self.config.tree_in_words
        with self._call(adds, read=lambda group: group.finished) as call:
            stats = [request.stats for group in call.groups for request in group.requests]
            with progress_bar(len(adds), "generating", hidden, lambda: SpeculationStats.total(stats), tree) as advance:
                for finished in call.run():
                    if finished:
                        advance()
        return [group.output() for group in call.groups]

    @check_call(FOREIGN_CALL)
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
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
        adds = self._adds(prompts, sampling_params, priority, cache_salt, lora_request)
        with closing(self._states(adds, trace)) as states:
            for _, state in states:
                yield state

    def numbered_stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        trace: bool = False,
    ) -> Generator[tuple[int, RequestOutput]]:
        """Run prompts like `stream`; yield the number of the prompt, from 0, with each state."""
        return self._states(self._adds(prompts, sampling_params), trace)

    def _states(self, adds: Sequence[Add], trace: bool) -> Generator[tuple[int, RequestOutput]]:
        for add in adds:
            add.trace = trace
        with self._call(adds, RequestGroup.output) as call:
            numbers = {group.request_id: number for number, group in enumerate(call.groups)}
            shown = [ShownStates(group.requests[0].params.output_kind) for group in call.groups]
            for state in call.run():
                number = numbers[state.request_id]
                for each in shown[number].of(state):
                    yield number, each

    @check_call(FOREIGN_CALL)
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template.

        Args:
            messages: dicts with `role` and `content`: text, or OpenAI's content parts of text.
            chat_template: a Jinja template in place of the model's.
            add_generation_prompt: end the prompt where the assistant's answer begins.
            continue_final_message: continue the last message instead; excludes `add_generation_prompt`.
            tools: descriptions of functions, for the template.
            tool_choice: OpenAI's; forced calls are the output's text, in the form that the template shows.
            chat_template_kwargs: further variables of the template.

        Raises:
            ValueError: a conversation that the template refuses, tools that `with_tools` refuses, or as in `generate`;
                nothing has run then.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer, default = self.request_maker.texts.need_tokenizer(), self.request_maker.default_params()
        used = tokenizer.chat_template if chat_template is None else chat_template
        sampling_params, shown = with_tools(tools, tool_choice, sampling_params, default, tokenizer, used)
        own = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        template = {} if chat_template is None else {"chat_template": chat_template}
        arguments: dict[str, Any] = {**own, **(chat_template_kwargs or {}), **template, **shown}
        prompts = [self.chat_prompt(conversation, **arguments) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            cache_salt=cache_salt,
        )

    @check_call(FOREIGN_SEARCH)
    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, lora_request: LoRARequests = None
    ) -> list[BeamSearchOutput]:
        """Search the most probable sequences after each prompt, all in one batch, without drafts.

        Tokens and scores are those of transformers' `generate` with `num_beams` of `params.beam_width`.

        Raises:
            ValueError: a prompt as in `generate`, or more beams than `max_num_seqs`; nothing has run then.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params is {params!r:.60}; it must be BeamSearchParams")
        seats = self.config.scheduler.max_num_seqs
        if params.beam_width > seats:
            raise ValueError(f"beam_width is {params.beam_width}; it must be at most max_num_seqs, {seats}")
        # The `beam_width` best candidates of a beam can matter, and as many that do not end.
        most = params.beam_width + (0 if params.ignore_eos else len(self.end_tokens))
        step = SamplingParams(
            temperature=0,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            logprobs=min(most, self.request_maker.model.vocab_size),
        )
        adds = self._adds(prompts, step, lora_request=lora_request)
        searches = run_searches(self._shared, adds, params)
        return [search.output(self.tokenizer) for search in searches]

    @check_call()
    def update_draft(self, draft: str | Path) -> None:
        """Replace the draft head between two steps. No output changes: drafts decide the speed alone.

        Steps wait while the head is loaded. Running requests go on with the new head over the cache that they have, and
        requests made from then on share no cached prefixes with earlier ones.

        Args:
            draft: a head of the present one's kind and shape, such as one that was trained from it: its folder, or its
                name on the hub, or a demo model's head by its word.

        Raises:
            CheckpointError: no head, or a damaged one; the present one goes on.
            ValueError: a head of another shape, or an engine without a head, or an adapter of the head is loaded;
                likewise.
        """
        folder = head_path(draft)
        self._ask(UpdateDraft(str(folder)))
        self.config = replace(self.config, draft=folder)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins.

        Args:
            template_arguments: variables of the chat template, such as `tools`.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        return self.request_maker.texts.chat_prompt(messages, template_arguments)

    def _adds(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequests = None,
    ) -> list[Add]:
        batch = prompt_batch(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = (
            one_each(batch, "sampling_params", params),
            one_each(batch, "priorities", 0 if priority is None else priority),
            one_each(batch, "lora_requests", lora_request),
        )
        adds = []
        for prompt, own, rank, adapter in zip(batch, *each, strict=True):
            content, text, salt = read_prompt(prompt, cache_salt)
            adds.append(self.request_maker.add(content, own, rank, salt))
            adds[-1].text, adds[-1].adapter = text, adapter
        return adds

    def _call(self, adds: Sequence[Add], read: Callable[[RequestGroup], T]) -> EngineCall[T]:
        # Compiled while other calls step the engine, and held until the requests have them.
        grammars = [self.request_maker.compile(add) for add in adds]
        call = self._shared.call(adds, read)
        del grammars
        return call

    def add_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter before a request asks for it.

        Raises:
            CheckpointError: no adapter in PEFT's format that fits the target.
            ValueError: an engine without `enable_lora`, or an id that another adapter has.
            QueueFullError: running requests have as many other adapters as can be loaded.
        """
        self._ask(LoadAdapter(lora_request))

    def remove_lora(self, lora_int_id: int) -> bool:
        """Unload an adapter; requests that have it run to their end. Return whether it was loaded."""
        reply = self._ask(UnloadAdapter(lora_int_id))
        assert isinstance(reply, Unloaded)
        return reply.was_loaded

    def list_loras(self) -> list[LoRARequest]:
        """Return the adapters that are loaded, the least recently used first."""
        with self._shared.turn() as engine:
            return engine.adapters.loaded()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer as transformers has it. It is the program's own: what is set on it changes no request.

        Raises:
            ValueError: a model without one.
        """
        return self.request_maker.texts.need_tokenizer().pretrained

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens after which the model's output ends."""
        return self.request_maker.end_tokens

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of the checkpoint's generation_config.json, with defaults for the others."""
        return self.request_maker.default_params()

    def stats(self) -> EngineStats:
        """Return counts since the start, and the current state of the engine."""
        reply = self._ask(GetStats())
        assert isinstance(reply, Stats)
        return reply.stats

    def _ask(self, command: Control) -> EngineReply:
        with self._shared.turn() as engine:
            return engine.handle(command)

    def get_metrics(self) -> list[Metric]:
        """Return the same as metrics, by the names that vLLM and the server use."""
        return list(engine_metrics(self.stats(), str(self.config.model)))
