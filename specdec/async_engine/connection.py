"""The interface through which an `AsyncLLM` reaches its engines."""

import asyncio
from typing import Protocol

from specdec.async_engine.errors import EngineDeadError
from specdec.core.commands import AnyCommand


class EngineConnection(Protocol):
    """An engine process, or several behind one connection, which others keep running.

    Attributes:
        healthy: whether requests are accepted.
        num_restarts: restarts of the engine process after failures; 0 where others count them.
    """

    healthy: bool
    num_restarts: int = 0

    @property
    def pid(self) -> int | None:
        """Process id of the only engine process; None if there is none, or several."""
        return None

    async def start(self) -> None:
        """Wait until requests are taken.

        Raises:
            ValueError: a setting or a file that the engine refuses.
            EngineDeadError: it cannot be started for another reason.
        """

    def send(self, number: int, command: AnyCommand) -> None:
        """Send a command without waiting; its replies go to the exchange under this number.

        Raises:
            EngineDeadError: nothing takes it.
        """

    def cancel(self, number: int) -> None:
        """End a call, if something carries it out."""

    def use_draft(self, draft: str | None) -> None:
        """Start engine processes with other draft sources from now on."""

    async def failure(self) -> EngineDeadError:
        """Wait until the engine has failed for good, and return why; for ever where others keep it running."""
        return await asyncio.Future()

    async def close(self) -> None:
        """End what was started."""
