"""Adapters of a server by their names, which requests give as their model."""

import asyncio
import itertools
import logging

from specdec.async_engine.async_llm import AsyncLLM
from specdec.async_engine.errors import EngineDeadError
from specdec.core.errors import QueueFullError
from specdec.core.lora_request import LoRARequest, with_whole_path
from specdec.openai.errors import ApiError
from specdec.server.lora_modules import read_lora_modules
from specdec.server.server_settings import ServerSettings

logger = logging.getLogger(__name__)


class ServedAdapters:
    """Adapters that clients may name.

    Args:
        names: of the model, which no adapter may have.

    Raises:
        ValueError: adapters are given and the engine takes none, or one has a name of the model.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, names: list[str]) -> None:
        self._llm, self._settings, self._names = llm, settings, names
        self._ids = itertools.count(1)
        self._served: dict[str, LoRARequest] = {}
        self._lock = asyncio.Lock()
        if (settings.lora_modules or settings.allow_runtime_lora_updating) and not llm.config.enable_lora:
            option = "--lora-modules" if settings.lora_modules else "--allow-runtime-lora-updating"
            raise ValueError(f"{option} needs --enable-lora; give both")
        self._given = {module.lora_name: self._named(*module) for module in read_lora_modules(settings.lora_modules)}

    def _named(self, name: str, path: str, draft_path: str | None) -> LoRARequest:
        if name in self._names:
            raise ValueError(f"an adapter is called {name!r}, as the model is; give it another name")
        return with_whole_path(LoRARequest(name, next(self._ids), path, draft_path))

    async def start(self) -> None:
        """Load the adapters of the settings.

        Raises:
            ValueError: one that cannot be loaded, or more than there are places for.
        """
        most = self._llm.config.max_loras
        for number, (name, adapter) in enumerate(self._given.items(), 1):
            # Later ones are loaded when they are asked for, but all of them are read once.
            await self._llm.add_lora(adapter)
            self._served[name] = adapter
            if number == most + 1:
                logger.warning("%d adapters for max_loras %d: they evict each other", len(self._given), most)

    def serve_given(self) -> None:
        """Serve the adapters of the settings without loading them; a request that names one that is none fails."""
        self._served |= self._given

    def get(self, model: str | None) -> LoRARequest | None:
        """Return the adapter that a request names as its model; None for the model itself."""
        return self._served.get(model) if model is not None else None

    def all(self) -> list[LoRARequest]:
        """Return the adapters that clients may name."""
        return list(self._served.values())

    async def load(self, name: str, path: str, draft_path: str | None, in_place: bool) -> None:
        """Serve an adapter from now on.

        Args:
            path, draft_path: see `LoRARequest`.
            in_place: whether it may replace one of the same name.

        Raises:
            ApiError: the server does not allow it; the name is taken; no adapter that fits.
            QueueFullError, EngineDeadError: no place; a dead engine.
        """
        self._check_allowed()
        async with self._lock:
            before = self._served.get(name)
            if before is not None and not in_place:
                raise ApiError(400, f"the adapter {name!r} is loaded already; unload it first", param="lora_name")
            try:
                adapter = self._named(name, path, draft_path)
                await self._llm.add_lora(adapter)
                self._served[name] = adapter
                if before is not None:
                    await self._llm.remove_lora(before.lora_int_id)
            except ValueError as error:
                field = "lora_name" if name in self._names or not name else "lora_path"
                raise ApiError(400, str(error), param=field) from None

    async def unload(self, name: str) -> None:
        """Serve an adapter no longer. Requests that have it run to their end.

        Raises:
            ApiError: the server does not allow it; there is no such adapter.
            QueueFullError, EngineDeadError: a replica that does not answer; a dead engine.
        """
        self._check_allowed()
        async with self._lock:
            adapter = self._served.pop(name, None)
            if adapter is None:
                raise ApiError(404, f"no adapter {name!r} is loaded", param="lora_name", code="model_not_found")
            try:
                await self._llm.remove_lora(adapter.lora_int_id)
            except (EngineDeadError, QueueFullError):
                # The client may try again.
                self._served[name] = adapter
                raise

    def _check_allowed(self) -> None:
        if not self._settings.allow_runtime_lora_updating:
            raise ApiError(403, "adapters stay as they are; start the server with --allow-runtime-lora-updating")
