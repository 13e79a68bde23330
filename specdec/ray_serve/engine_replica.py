"""A replica: an engine process behind calls from other processes. Without Ray, whose hooks it has by name."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path

from specdec.async_engine.async_llm import engine_setup
from specdec.async_engine.errors import EngineDeadError
from specdec.async_engine.messages import (
    Abort,
    AdapterChanged,
    Add,
    CheckIntegrity,
    Delta,
    FromEngine,
    GetStats,
    Integrity,
    LoadAdapter,
    News,
    Refused,
    Stats,
    UnloadAdapter,
    decode_params,
    decode_to_engine,
    encode,
)
from specdec.async_engine.supervisor import Supervisor
from specdec.building.vllm_keywords import LLMKeywords
from specdec.ray_serve.route import Route


class _Relay:
    """News of one request on their way to its caller."""

    def __init__(self, num_samples: int) -> None:
        self._left = num_samples
        self._deltas: list[Delta] = []
        self._refusal: Refused | None = None
        self._error: EngineDeadError | None = None
        self._news = asyncio.Event()

    @property
    def finished(self) -> bool:
        """True once the engine process has nothing more to send."""
        return self._left == 0 or self._refusal is not None or self._error is not None

    @property
    def delivered(self) -> bool:
        """True once all that came has been read too."""
        return self.finished and not self._deltas

    def apply(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._left -= delta.finish_reason is not None
        self._news.set()

    def fail(self, reason: Refused | EngineDeadError) -> None:
        if isinstance(reason, Refused):
            self._refusal = reason
        else:
            self._error = reason
        self._news.set()

    async def read(self) -> News | Refused:
        """Wait for news, and return all of them.

        Raises:
            EngineDeadError: the engine process ended.
        """
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error
        if self._refusal is not None:
            return self._refusal
        deltas, self._deltas = self._deltas, []
        return News(deltas)


class EngineReplica:
    """One engine process, which is started again when it dies, as that of an `AsyncLLM`.

    Messages are those of `specdec.async_engine.messages`, encoded.

    Args:
        model, draft, settings: as `LLM` takes them.
        engine_timeout: as `AsyncLLM` takes it.
    """

    def __init__(
        self, model: str | Path | None, draft: str | Path | None, settings: LLMKeywords, engine_timeout: float
    ) -> None:
        _, setup = engine_setup(model, draft, settings)
        self._supervisor = Supervisor(setup, self._receive, self._fail_all, self._is_waiting, engine_timeout)
        # Requests by their numbers in the engine process, and these by their callers' names.
        self._relays: dict[int, _Relay] = {}
        self._numbers: dict[str, int] = {}
        self._calls: dict[int, asyncio.Future[Stats | Integrity | AdapterChanged]] = {}
        self._new_number = itertools.count()

    async def check_health(self) -> None:
        """Start the engine process if it was not; a replica takes no calls before this has returned.

        Raises:
            ValueError: a setting or file that the engine refuses.
            EngineDeadError: the engine process cannot be started, or has died too often.
        """
        await self._supervisor.start()
        self._supervisor.check()

    async def generate(self, name: str, request: bytes, _: Route | None = None) -> AsyncGenerator[bytes]:
        """Run a request, an encoded `Add`; yield its `News`, or `Refused`. Closing the generator aborts it.

        Args:
            name: the caller's name of the request, for `abort`.

        Raises:
            EngineDeadError: the engine process is not there, or dies meanwhile.
        """
        add = decode_to_engine(request)
        assert isinstance(add, Add)
        add.number = number = next(self._new_number)
        self._supervisor.send(add)
        relay = self._relays[number] = _Relay(decode_params(add.params).n)
        self._numbers[name] = number
        try:
            while not relay.delivered:
                yield encode(await relay.read())
        finally:
            del self._relays[number], self._numbers[name]
            if not relay.finished and self._supervisor.healthy:
                self._supervisor.send(Abort(number))

    async def abort(self, name: str, _: Route | None = None) -> None:
        """End a request; its last news follow."""
        number = self._numbers.get(name)
        if number is not None and self._supervisor.healthy:
            self._supervisor.send(Abort(number))

    async def ask(self, question: bytes) -> bytes:
        """Return the engine process's answer to `GetStats`, `CheckIntegrity`, `LoadAdapter` or `UnloadAdapter`.

        Raises:
            EngineDeadError: the engine process is not there.
        """
        message = decode_to_engine(question)
        assert isinstance(message, GetStats | CheckIntegrity | LoadAdapter | UnloadAdapter)
        message.call_id = next(self._new_number)
        answer = self._calls[message.call_id] = asyncio.get_running_loop().create_future()
        try:
            self._supervisor.send(message)
            return encode(await answer)
        finally:
            del self._calls[message.call_id]

    async def close(self) -> None:
        """End the engine process."""
        await self._supervisor.close()
        self._fail_all(EngineDeadError("the replica was stopped before the request had finished", restarting=True))

    def _receive(self, message: FromEngine) -> None:
        match message:
            case News(deltas):
                for delta in deltas:
                    # Its caller may have left.
                    if relay := self._relays.get(delta.number):
                        relay.apply(delta)
            case Refused(number):
                if relay := self._relays.get(number):
                    relay.fail(message)
            case Stats() | Integrity() | AdapterChanged():
                answer = self._calls.get(message.call_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _is_waiting(self) -> bool:
        return bool(self._relays or self._calls)

    def _fail_all(self, error: EngineDeadError) -> None:
        for relay in self._relays.values():
            if not relay.finished:
                relay.fail(error.fresh())
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error.fresh())
