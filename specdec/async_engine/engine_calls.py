"""Calls of an engine process that wait for its answer."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from specdec.async_engine.errors import EngineDeadError
from specdec.async_engine.messages import (
    AdapterChanged,
    CheckIntegrity,
    DraftUpdated,
    GetStats,
    Integrity,
    LoadAdapter,
    Stats,
    ToEngine,
    UnloadAdapter,
    UpdateDraft,
)

Call = GetStats | CheckIntegrity | UpdateDraft | LoadAdapter | UnloadAdapter
Answer = Stats | Integrity | DraftUpdated | AdapterChanged


class Holdings(NamedTuple):
    """Requests and cache blocks in use by an engine process; 0 and 0 while it is idle.

    Attributes:
        requests: unfinished requests.
        blocks: cache blocks that those use.
    """

    requests: int
    blocks: int


class EngineCalls:
    """Calls on their way, by the numbers of their messages."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def ask(self, send: Callable[[ToEngine], None], message: Call) -> Answer:
        """Send a call, and return its answer.

        Raises:
            EngineDeadError: the engine process is not there, or dies meanwhile.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[message.call_id] = answer
        try:
            send(message)
            return await answer
        finally:
            del self._waiting[message.call_id]

    def receive(self, message: Answer) -> None:
        """Hand an answer to its call, which may have been cancelled."""
        answer = self._waiting.get(message.call_id)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def fail(self, error: EngineDeadError) -> None:
        """Have all calls get an error."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error.fresh())
