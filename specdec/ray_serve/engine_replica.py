"""A replica: an engine process behind calls from other processes. Without Ray, whose hooks it has by name."""

from collections.abc import AsyncGenerator
from pathlib import Path

from specdec.async_engine.async_llm import engine_setup
from specdec.async_engine.errors import EngineDeadError
from specdec.async_engine.exchange import Exchange, PendingReplies, ask
from specdec.async_engine.messages import decode_command, encode
from specdec.async_engine.supervisor import Supervisor
from specdec.building.vllm_keywords import LLMKeywords
from specdec.ray_serve.replicas import Route


class EngineReplica:
    """One engine process, which is started again when it dies, as that of an `AsyncLLM`.

    Commands and replies are those of `specdec.core.commands`, encoded.

    Args:
        model, draft, settings: as `LLM` takes them.
        engine_timeout: as `AsyncLLM` takes it.
    """

    def __init__(
        self, model: str | Path | None, draft: str | Path | None, settings: LLMKeywords, engine_timeout: float
    ) -> None:
        _, setup = engine_setup(model, draft, settings)
        self._exchange = Exchange()
        self._supervisor = Supervisor(setup, self._exchange, engine_timeout)
        # Calls in the engine process by their callers' names.
        self._numbers: dict[str, int] = {}

    async def check_health(self) -> None:
        """Start the engine process if it was not; a replica takes no calls before this has returned.

        Raises:
            ValueError: a setting or file that the engine refuses.
            EngineDeadError: the engine process cannot be started, or has died too often.
        """
        await self._supervisor.start()
        self._supervisor.check()

    async def generate(self, name: str, command: bytes, _: Route | None = None) -> AsyncGenerator[bytes]:
        """Carry out a command; yield its replies as they come, lists of `ReplyTo`. Closing the generator ends it.

        Args:
            name: the caller's name of the call, for `abort`.

        Raises:
            EngineDeadError: the engine process is not there, or dies meanwhile.
        """
        pending = PendingReplies()
        number = self._exchange.open(pending)
        self._numbers[name] = number
        try:
            self._supervisor.send(number, decode_command(command))
            is_last = False
            while not is_last:
                replies = await pending.read()
                is_last = replies[-1].is_last
                yield encode(replies)
        finally:
            del self._numbers[name]
            if self._exchange.forget(number):
                self._supervisor.cancel(number)

    async def abort(self, name: str, _: Route | None = None) -> None:
        """End a call of `generate`; its last replies follow."""
        if (number := self._numbers.get(name)) is not None:
            self._supervisor.cancel(number)

    async def ask(self, command: bytes) -> bytes:
        """Return the only reply to a command, a `ReplyTo`.

        Raises:
            EngineDeadError: the engine process is not there.
        """
        return encode(await ask(self._exchange, self._supervisor.send, decode_command(command)))

    async def close(self) -> None:
        """End the engine process."""
        await self._supervisor.close()
        reason = "the replica was stopped before the request had finished"
        self._exchange.fail_all(EngineDeadError(reason, restarting=True))
