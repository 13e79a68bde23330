"""State that all routes share: the engine, the model's names, default parameters, metrics, and running requests."""

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, Self, TypeVar, cast

from fastapi import Request, Response

from specdec.async_engine.async_llm import AsyncLLM
from specdec.async_engine.client_threads import SHORT_TEXT
from specdec.async_engine.errors import EngineDeadError
from specdec.config import EngineConfig
from specdec.core.call_forms import form_name
from specdec.core.engine_stats import EngineStats
from specdec.core.errors import QueueFullError
from specdec.core.outputs import CompletionOutput, RequestOutput
from specdec.core.sampling_params import SamplingParams
from specdec.openai.completion_request import Prompt
from specdec.openai.connection import EventStream, while_connected
from specdec.openai.errors import ApiError, bad_request, code_of
from specdec.openai.operation_requests import ScoringRequest
from specdec.openai.reasoning_text import ServedReasoning
from specdec.openai.replies import json_response, now
from specdec.openai.request_model import RequestModel
from specdec.openai.sampling_fields import SamplingFields
from specdec.openai.served_model import ServedModel
from specdec.server.adapters import ServedAdapters
from specdec.server.chat_templates import read_chat_template
from specdec.server.merged import merged
from specdec.server.metrics import RequestTimer, ServerMetrics
from specdec.server.server_settings import ServerSettings
from specdec.server.traces import traces_to
from specdec.tool_calls.tool_parsers import PlainText, parser_for

T = TypeVar("T")
# Numbers of prompts with their states.
States = AsyncGenerator[tuple[int, RequestOutput]]

logger = logging.getLogger(__name__)
# Seconds that `/metrics` waits for the engine, which answers between two steps.
_STATS_TIMEOUT = 1.0
# Fields, tools and items without effect that are remembered, so that each is reported once.
_MOST_REPORTS = 100
# Parameters that can forbid every token.
_FORBIDDING = ("allowed_token_ids", "bad_words", "min_tokens", "structured_outputs")


class AnswerMaker(Protocol):
    """Makes the answer to a request of its states, whole or as events; a late error ends these by one of its own."""

    def whole(self, states: Sequence[RequestOutput]) -> object: ...
    def events(self, states: States) -> AsyncGenerator[bytes]: ...
    def error_event(self, error: ApiError) -> bytes: ...


class Service:
    """One model served to many clients.

    Args:
        name: name of the model where the settings give none.

    Attributes:
        served: the model as answers show it.
        adapters: those that requests may name.
        defaults: sampling parameters of requests that leave them out.
        tool_tags: tags of tool calls that are special tokens of the tokenizer, with these.
        started: seconds since 1970.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, name: str) -> None:
        self.llm, self.settings = llm, settings
        names = list(settings.served_model_name) or [name]
        self.adapters = ServedAdapters(llm, settings, names)
        self.metrics = ServerMetrics(names[0], llm.max_model_len, _cache_labels(llm.config))
        self._stats: EngineStats | None = None
        self._asking: asyncio.Task[EngineStats] | None = None
        self.traces = traces_to(settings.otlp_traces_endpoint)
        self.started = now()
        self.defaults: Mapping[str, Any] = llm.generation_config.params if settings.generation_config == "auto" else {}
        if settings.chat_template is not None:
            if llm.tokenizer is None:
                raise ValueError("--chat-template needs a model with a tokenizer; leave it out")
            llm.tokenizer.set_chat_template(read_chat_template(settings.chat_template))
        template = llm.tokenizer.chat_template if llm.tokenizer else ""
        parser, figures = parser_for(settings.tool_call_parser, template), settings.per_request_spec_decode_metrics
        reasoning = ServedReasoning.of(llm.config.reasoning_parser, llm.thinking)
        self.served = ServedModel(names, llm.tokenizer, parser, reasoning, figures, llm.config.shape.depth)
        self.tool_tags = llm.tokenizer.special_named(parser.TAGS) if llm.tokenizer else {}
        if self.tool_tags:
            self.defaults = {**self.defaults, "kept_special_tokens": sorted(self.tool_tags.values())}
        if settings.tool_call_parser == "auto" and parser is not PlainText:
            logger.info("tool calls have the form %s, as the chat template shows", form_name(template))
        if self._finds_no_calls and "tools" in template:
            logger.warning(
                "the chat template has tools and shows no form of calls that is known, so calls come back as text; "
                "set --tool-call-parser to its form, or to none"
            )
        # Ids of the engine's requests by the answer's id.
        self._running: dict[str, list[str]] = {}
        # Time limits of bodies that are arriving.
        self.arriving: set[asyncio.Timeout] = set()
        self._reported: set[str] = set()
        self._has_warned_of_tools = self.is_ending = False

    @property
    def _finds_no_calls(self) -> bool:
        """True if the parser of tool calls was to be chosen by the chat template, and none fits it."""
        return self.settings.tool_call_parser == "auto" and self.served.tool_parser is PlainText

    def check_chosen_tools(self) -> None:
        """Refuse tools that the model chooses among, calls being neither forced nor unwanted, where it may not.

        Raises:
            ApiError: as vLLM does.
        """
        if not self.settings.enable_auto_tool_choice:
            message = 'tool_choice "auto" needs --enable-auto-tool-choice at the server; send "none"'
            raise ApiError(400, message, param="tool_choice")
        if self._finds_no_calls and not self._has_warned_of_tools:
            self._has_warned_of_tools = True
            logger.warning(
                "a request has tools, and the chat template shows no form of calls that is known, so calls come "
                "back as text; set --tool-call-parser to its form, or to none (shown once)"
            )

    def leave_room(self, params: SamplingParams) -> None:
        """Replace -1 for the tokens of a prompt by as many as leave room for the answer, at most a quarter of all."""
        if params.truncate_prompt_tokens == -1:
            longest = self.llm.max_model_len
            params.truncate_prompt_tokens = max(1, longest - min(params.max_tokens or longest, longest // 4))

    def accept(self, body: RequestModel, model: str | None) -> Self:
        """Check lengths of lists and the name of the model or adapter, log ignored fields once, and return itself.

        Raises:
            ApiError: 404, another model; 400, a list that is too long.
        """
        try:
            self.llm.config.limits.check(body)
        except ValueError as error:
            raise bad_request(error) from None
        if model is not None and model not in self.served.names and self.adapters.get(model) is None:
            served = [*self.served.names, *(adapter.lora_name for adapter in self.adapters.all())]
            message = f"the model {model!r} is not served; served is {', '.join(served)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        for what in body.ignored():
            if what not in self._reported and len(self._reported) < _MOST_REPORTS:
                self._reported.add(what)
                logger.warning("requests have %s: ignored (shown once)", what)
        return self

    async def tokens(
        self,
        request: Request,
        prompts: Sequence[Prompt],
        add_special_tokens: bool = True,
        may_be_longer: bool = True,
    ) -> list[list[int]]:
        """Return the tokens of prompts. Texts take time, so they are encoded in a thread.

        Args:
            may_be_longer: see `RequestTexts.encode`.

        Raises:
            ApiError: a text that is too long.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(list[list[int]]())
        if texts:
            _ = self.served.needed_tokenizer
            size = sum(map(len, texts))
            work = partial(self.llm.texts.encode, texts, add_special_tokens, may_be_longer)
            encoded = iter(await self._tokenized(request, size, "prompt", work))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def chat_tokens(
        self,
        request: Request,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        field: str = "messages",
        may_be_longer: bool = True,
    ) -> list[int]:
        """Return the tokens of a conversation, which a field of the request holds.

        Args:
            may_be_longer: see `RequestTexts.encode`.

        Raises:
            ApiError: the chat template refuses it, or there is none; a conversation that is too long.
        """
        work = partial(self.llm.texts.chat_prompt, messages, arguments, may_be_longer)
        return await self._tokenized(request, request.state.body_size, field, work)

    async def in_lane(self, request: Request, size: int, work: Callable[[], T]) -> T:
        """Return the result of work on `size` characters of a request, in a thread.

        Work on a long request ends when the client goes away or the time is over; watching costs more than a short one.

        Raises:
            ClientGoneError, ApiError: see `while_connected`; what the work raises.
        """
        running = self.llm.lanes.run(request.state.client, size, work)
        if request.state.body_size <= SHORT_TEXT:
            return await running
        return await while_connected(request.receive, running, self.settings.request_timeout)

    async def _tokenized(self, request: Request, size: int, field: str, work: Callable[[], T]) -> T:
        try:
            return await self.in_lane(request, size, work)
        except ValueError as error:
            raise ApiError(400, str(error), param=field, code=code_of(error)) from None

    async def run(
        self,
        answer_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        request: Request,
        body: SamplingFields | ScoringRequest,
        prompt_field: str = "prompt",
    ) -> States:
        """Run prompts of one request; yield a prompt's number and state after each step in which it got tokens.

        Args:
            request: its state names the client, its headers may name the span that it belongs to.
            body: that of the request. If it is not streamed, states between the first token and the end are left out.
            prompt_field: field of the request that holds the prompt.

        Raises:
            ApiError: a prompt or parameter that the model does not support; a full queue; a dead engine; the server's
                end.
        """
        if self.is_ending:
            raise shutting_down()
        most = self.llm.config.scheduler.max_queued_requests
        if most is not None and len(prompts) > most:
            message = f"{prompt_field} holds {len(prompts)} prompts; at most {most} may wait here: send fewer at once"
            raise ApiError(400, message, param=prompt_field)
        adapter = self.adapters.get(body.model)
        if adapter is None and self.served.answer_name(body.model) not in self.served.names:
            raise ApiError(404, f"the adapter {body.model!r} was unloaded", param="model", code="model_not_found")
        # Clients may choose the same id twice.
        ids = [f"{answer_id}-{secrets.token_hex(4)}-{index}" for index in range(len(prompts))]
        self._running[answer_id] = [*self._running.get(answer_id, ()), *ids]
        spans = [
            self.traces.start(request.headers, own, self.served.names[0], params) if self.traces else None
            for own in ids
        ]
        timers = [RequestTimer(self.metrics, params, span) for span in spans]
        states = [
            self.llm.generate(
                prompt,
                params,
                request_id=own,
                lora_request=adapter,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                client=request.state.client,
                interval=self.settings.stream_delay / 1000 if body.stream else math.inf,
                trace=bool(body.trace),
            )
            for prompt, own in zip(prompts, ids, strict=True)
        ]
        try:
            async with aclosing(merged(states)) as both:
                async for index, state in both:
                    timers[index].saw(state)
                    if self.is_ending and not state.finished:
                        # The engine did not know it yet when all were aborted.
                        raise shutting_down()
                    self._check_outputs(state.outputs, params)
                    yield index, state
        except (GeneratorExit, asyncio.CancelledError):
            for timer in timers:
                timer.end_early("abort")
            raise
        except ApiError:
            for timer in timers:
                timer.end_early("abort" if self.is_ending else "error")
            raise
        except ValueError as error:
            fields = {"prompt": prompt_field, "structured_outputs": body.structure_field}
            raise bad_request(error, body.sent_names, fields) from None
        except QueueFullError as error:
            raise ApiError(503, f"the queue is full: {error}", code="queue_full") from None
        except EngineDeadError as error:
            for timer in timers:
                timer.end_early("error")
            raise ApiError(503, str(error), code="engine_dead") from None
        finally:
            for timer in timers:
                timer.close()
            left = [each for each in self._running.pop(answer_id, ()) if each not in ids]
            if left:
                self._running[answer_id] = left

    async def reply(
        self, request: Request, answer: AnswerMaker, states: States, count: int, is_streamed: bool
    ) -> Response:
        """Return the answer made of the states of `count` prompts, whole or as a stream."""
        if is_streamed:
            limit, interval = self.settings.request_timeout, self.settings.sse_keep_alive_interval
            return EventStream(answer.events(states), limit, interval, answer.error_event)
        return json_response(answer.whole(await self.final(request, states, count)))

    async def final(self, request: Request, states: States, count: int) -> list[RequestOutput]:
        """Return the last states of `count` prompts, in order, while the client is connected; see `while_connected`."""
        last = await while_connected(request.receive, _last(states), self.settings.request_timeout)
        return [last[index] for index in range(count)]

    def _check_outputs(self, outputs: Sequence[CompletionOutput], params: SamplingParams) -> None:
        for output in outputs:
            if output.finish_reason == "abort" and self.is_ending:
                raise shutting_down()
            if output.finish_reason == "error":
                is_asked_for = any(getattr(params, name) for name in _FORBIDDING)
                raise ApiError(400 if is_asked_for else 500, output.error or "the request failed", code="no_token")

    async def abort(self, request_id: str) -> bool:
        """Abort a request by its answer's id or its X-Request-Id; return whether it was running."""
        found = [answer for answer in self._running if request_id in (answer, answer.partition("-")[2])]
        ids = [each for answer in found for each in self._running[answer]]
        results = [await self.llm.abort(each) for each in ids]
        return any(results)

    async def update_draft(self, draft: str) -> str:
        """Replace the draft head; return its path.

        Raises:
            ApiError: the server's settings do not allow it; a head that does not fit.
            QueueFullError, EngineDeadError: a replica that does not answer; a dead engine.
        """
        if not self.settings.allow_draft_updates:
            raise ApiError(403, "the draft head is not replaced here; start the server with --allow-draft-updates")
        try:
            await self.llm.update_draft(draft)
        except (ValueError, OSError) as error:
            raise ApiError(400, str(error), param="draft") from None
        return str(self.llm.config.draft)

    async def metrics_page(self) -> bytes:
        """Return all metrics as text; those of an engine that does not answer soon are the last known."""
        self._take_stats()
        # One question at a time: an engine that hangs would be asked by every scrape.
        self._asking = self._asking or asyncio.create_task(self.llm.stats())
        await asyncio.wait([self._asking], timeout=_STATS_TIMEOUT)
        self._take_stats()
        return self.metrics.page(self._stats, self.llm.num_restarts)

    def _take_stats(self) -> None:
        """Keep the figures that the engine was asked for, once they are there; the last ones if it refused."""
        if self._asking is not None and self._asking.done():
            asked, self._asking = self._asking, None
            error = asked.exception()
            if error is None:
                self._stats = asked.result()
            elif isinstance(error, EngineDeadError):
                self._stats = None
            elif not isinstance(error, QueueFullError):
                raise error

    async def end_requests(self) -> None:
        """Abort every running request, and answer it and later ones with 503."""
        self.is_ending = True
        for limit in self.arriving:
            # One that is passing now ends by itself.
            if not limit.expired():
                limit.reschedule(0)
        for answer in list(self._running):
            await self.abort(answer)


async def _last(states: States) -> dict[int, RequestOutput]:
    async with aclosing(states) as news:
        return {index: state async for index, state in news}


def shutting_down() -> ApiError:
    """Return the error of requests that a server which ends does not answer."""
    return ApiError(503, "the server is shutting down; try again", code="shutting_down")


def _cache_labels(config: EngineConfig) -> dict[str, str]:
    """Return vLLM's labels of the cache's settings."""
    return {
        "block_size": str(config.block_size),
        "cache_dtype": str(config.kv_cache_dtype),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
    }


def service_of(request: Request) -> Service:
    """Return the service of the application that a request came to."""
    return cast(Service, request.app.state.service)
