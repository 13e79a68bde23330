"""The asynchronous Python API."""

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self, Unpack

from specdec.async_engine.client_threads import SHORT_TEXT, TextLanes
from specdec.async_engine.connection import EngineConnection
from specdec.async_engine.errors import CLOSED, EngineDeadError
from specdec.async_engine.exchange import Exchange, ask
from specdec.async_engine.messages import Setup
from specdec.async_engine.request_stream import RequestStream
from specdec.async_engine.supervisor import Supervisor
from specdec.building.named_checkpoints import head_path
from specdec.building.resolved_config import resolved_config
from specdec.building.vllm_keywords import LLMKeywords, own_settings
from specdec.config import AUTO, EngineConfig
from specdec.core.commands import (
    AnyCommand,
    CheckIntegrity,
    EngineReply,
    GetStats,
    Integrity,
    LoadAdapter,
    Refused,
    Stats,
    UnloadAdapter,
    Unloaded,
    UpdateDraft,
)
from specdec.core.engine_stats import EngineStats
from specdec.core.lora_request import LoRARequest, with_whole_path
from specdec.core.outputs import RequestOutput, RequestOutputKind, ShownStates
from specdec.core.sampling_params import SamplingParams
from specdec.engine.prompts import Prompt, read_prompt
from specdec.engine.request_maker import RequestMaker
from specdec.engine.request_texts import num_characters
from specdec.kernels.types.settings import check_call, check_text
from specdec.models.llama import read_llama_config

# Least time limit of a silent engine process, in seconds: some heartbeats must fit in.
LEAST_TIMEOUT = 1.0


class Holdings(NamedTuple):
    """Requests and cache blocks in use by an engine process; 0 and 0 while it is idle.

    Attributes:
        requests: unfinished requests.
        blocks: cache blocks that those use.
    """

    requests: int
    blocks: int


def engine_setup(
    model: str | Path | None, draft: str | Path | None, settings: LLMKeywords
) -> tuple[EngineConfig, Setup]:
    """Resolve settings as `LLM` takes them: with nothing left open, and as an engine process takes them.

    The process gets the paths that were found for names on the hub.

    Raises:
        CheckpointError: a folder whose configuration cannot be read.
        ValueError: an unknown setting, or one outside its range.
    """
    draft, own = own_settings(model, draft, settings)
    config = resolved_config(model, draft, own)
    return config, Setup.of(config.model, config.sources, {**own, "revision": None, "draft_revision": None})


class AsyncLLM:
    """A target model with a draft head, in a process of its own, for programs on asyncio.

    async with AsyncLLM(draft="eagle") as llm:
        async for state in llm.generate("I would like to find a restaurant.", SamplingParams(max_tokens=64)):
            print("".join(segment.text for segment in state.segments), end="")

    All calls belong to the event loop that runs `start`. Their requests share the engine's steps, and a new one joins
    at the next step. Tokens are those of `LLM`. If the engine process dies, running requests raise `EngineDeadError`
    at once, and it is started again, up to five times with growing delays. A process that hangs is killed.

    Args:
        model, draft, settings: as `LLM` takes them.
        engine_timeout: seconds without a sign of life of the engine process, while requests wait, after which it is
            killed; 0 for no limit. It must exceed the longest step.

    Attributes:
        config: the settings, with nothing left open.
        tokenizer: None for a model without one.
        thinking: marks of the model's thinking, None without a `reasoning_parser`.
        generation_config: end tokens and default sampling parameters of the checkpoint.
        max_model_len: limit of a request's tokens, prompt included.
        texts: makes tokens of texts.
        lanes: threads for that, beside the event loop.

    Raises:
        CheckpointError: a folder whose configuration or tokenizer cannot be read.
        ValueError: an unknown setting, or one outside its range.
    """

    @check_call()
    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | None = AUTO,
        *,
        engine_timeout: float = 300.0,
        **settings: Unpack[LLMKeywords],
    ) -> None:
        if engine_timeout != 0 and not engine_timeout >= LEAST_TIMEOUT:
            raise ValueError(f"engine_timeout is {engine_timeout}; it must be 0 or at least {LEAST_TIMEOUT:g} second")
        self.config, setup = engine_setup(model, draft, settings)
        self._requests = RequestMaker.read(self.config, read_llama_config(self.config.model))
        self.tokenizer, self.max_model_len = self._requests.tokenizer, self._requests.max_model_len
        self.thinking = self._requests.thinking
        self.generation_config = self._requests.generation_config
        self.texts, self.lanes = self._requests.texts, TextLanes()
        self._exchange = Exchange()
        self._connection = self._connect(setup, engine_timeout)
        # Calls of requests by their names.
        self._numbers: dict[str, int] = {}
        self._new_name = itertools.count()
        self._closing = False

    def _connect(self, setup: Setup, timeout: float) -> EngineConnection:
        """Return what runs the requests, which is not started yet."""
        return Supervisor(setup, self._exchange, timeout)

    async def start(self) -> None:
        """Start the engine process and wait until the model is loaded.

        Raises:
            ValueError: a setting or a file that the engine refuses, in one line.
            EngineDeadError: the process could not start for another reason.
        """
        await self._connection.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        interval: float = 0.0,
        trace: bool = False,
    ) -> AsyncGenerator[RequestOutput]:
        """Run a prompt, and yield its state after each step that gave tokens.

        States are merged for a reader that is slower than the engine. `segments` of a state is the text that is new
        since the one before. The last state is finished. Closing the generator, or cancelling the task that reads it,
        aborts the request.

        Args:
            prompt: text or token ids, or a dict of these.
            params: those of `get_default_sampling_params` if None.
            request_id: a name for `abort`, of no other running request; a number if None.
            lora_request: an adapter, which is loaded if it is not yet; needs `enable_lora`.
            priority: lower ones first, under the policy "priority".
            cache_salt: only requests of the same salt share cached prefixes.
            client: name of the client that sent it; clients have turns, under the policy "fcfs".
            interval: seconds for which tokens after the first may wait to come in one state, which costs less where
                tokens come fast; infinity for the states after the first token and at the end alone.
            trace: let the outputs' `steps` hold all steps with their draft trees.

        Raises:
            ValueError: a bad prompt, parameter or request id; nothing has run then.
            QueueFullError: too many requests wait, or running ones have too many other adapters; nothing has run then.
            RuntimeError: the engine failed while it took the request.
            EngineDeadError: the engine process is not there, or dies meanwhile.
        """
        params = self.get_default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r}; it must be SamplingParams")
        if not interval >= 0:
            raise ValueError(f"interval is {interval}; it must be a number of seconds from 0")
        if request_id is not None:
            check_text("request_id", request_id)
        content, text, cache_salt = read_prompt(prompt, cache_salt)
        size = num_characters(content, params)
        if size > SHORT_TEXT or params.structured_outputs is not None:
            add = await self.lanes.run(client, size, self._requests.add, content, params, priority, cache_salt)
        else:
            add = self._requests.add(content, params, priority, cache_salt)
        add.adapter = None if lora_request is None else with_whole_path(lora_request)
        # States between the first token and the end are not shown.
        add.interval = math.inf if params.output_kind is RequestOutputKind.FINAL_ONLY else interval
        add.client, add.trace = client, trace
        name = self._free_name() if request_id is None else request_id
        if self._is_running(name):
            raise ValueError(f"request_id {name!r} is taken by a running request; give another")
        if self._closing:
            raise EngineDeadError(CLOSED)
        stream = RequestStream(name, text, add)
        number = self._exchange.open(stream)
        shown = ShownStates(params.output_kind)
        try:
            self._connection.send(number, add)
            self._numbers[name] = number
            while True:
                state = await stream.read()
                for part in shown.of(state):
                    yield part
                if state.finished:
                    return
        finally:
            if self._exchange.forget(number):
                self._connection.cancel(number)
            if self._numbers.get(name) == number:
                del self._numbers[name]

    def _is_running(self, name: str) -> bool:
        return self._numbers.get(name) in self._exchange

    def _free_name(self) -> str:
        names = map(str, self._new_name)
        return next(name for name in names if not self._is_running(name))

    async def abort(self, request_id: str) -> bool:
        """End a request; its generator yields a last state with the finish reason "abort".

        Returns:
            Whether such a request was running.
        """
        if not self._is_running(request_id):
            return False
        self._connection.cancel(self._numbers[request_id])
        return True

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins; see `LLM.chat_prompt`."""
        return self.texts.chat_prompt(messages, template_arguments)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens after which the model's output ends."""
        return self._requests.end_tokens

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of the checkpoint's generation_config.json, with defaults for the others."""
        return self._requests.default_params()

    async def stats(self) -> EngineStats:
        """Return counts since the start of the engine process, and its current state.

        Raises:
            EngineDeadError: the engine process is not there.
            QueueFullError: one of several replicas does not answer.
        """
        reply = await self._ask(GetStats())
        assert isinstance(reply, Stats)
        return reply.stats

    async def update_draft(self, draft: str | Path) -> None:
        """Replace the draft head between two steps; see `LLM.update_draft`.

        An engine process that is restarted begins with the head that was given last.

        Raises:
            ValueError: no head that fits; the present one goes on.
            EngineDeadError: the engine process is not there, or dies meanwhile.
        """
        # A download takes longer than the event loop may wait.
        folder = (await asyncio.to_thread(head_path, draft)).absolute()
        await self._ask(UpdateDraft(str(folder)))
        self.config = replace(self.config, draft=folder)
        self._connection.use_draft(self.config.sources)

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter before a request asks for it; see `LLM.add_lora`.

        Raises:
            ValueError: no adapter that fits the target, or an engine without adapters.
            QueueFullError: running requests have as many other adapters as can be loaded.
            EngineDeadError: the engine process is not there, or dies meanwhile.
        """
        await self._ask(LoadAdapter(with_whole_path(lora_request)))

    async def remove_lora(self, lora_int_id: int) -> bool:
        """Unload an adapter; requests that have it run to their end. Return whether it was loaded."""
        reply = await self._ask(UnloadAdapter(lora_int_id))
        assert isinstance(reply, Unloaded)
        return reply.was_loaded

    async def check_integrity(self) -> Holdings:
        """Check the scheduler and the cache in the engine process, for tests: recompute their invariants.

        Raises:
            AssertionError: the first invariant that does not hold.
            EngineDeadError: the engine process is not there.
        """
        reply = await self._ask(CheckIntegrity())
        assert isinstance(reply, Integrity)
        if reply.problem is not None:
            raise AssertionError(reply.problem)
        return Holdings(reply.requests, reply.blocks)

    @property
    def healthy(self) -> bool:
        """True while the engine process takes requests."""
        return self._connection.healthy and not self._closing

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine process, None if there is none."""
        return self._connection.pid

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the engine process after failures."""
        return self._connection.num_restarts

    async def failure(self) -> EngineDeadError:
        """Wait until the engine process has failed and is not started again, and return why."""
        return await self._connection.failure()

    async def close(self, grace: float = 0.0) -> None:
        """End the engine process, and refuse new requests.

        Args:
            grace: seconds in which running requests may finish. Those that do not are aborted: their generators yield
                a last state with the finish reason "abort".
        """
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._exchange.wait_until_empty()
        await self._connection.close()
        self._exchange.fail_all(EngineDeadError("the engine was closed before the request had finished"))

    async def _ask(self, command: AnyCommand) -> EngineReply:
        """Send a command that has one reply, and return it.

        Raises:
            ValueError, QueueFullError, RuntimeError: the engine refuses it, or fails.
            EngineDeadError: the engine process is not there, or dies meanwhile.
        """
        reply = (await ask(self._exchange, self._connection.send, command)).reply()
        if isinstance(reply, Refused):
            raise reply.error()
        return reply
