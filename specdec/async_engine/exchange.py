"""Pending calls to an engine, by number, and the receivers of their replies."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from specdec.async_engine.errors import EngineDeadError
from specdec.async_engine.messages import ReplyTo
from specdec.core.commands import AnyCommand


class Receiver(Protocol):
    """Takes the replies to a call."""

    def receive(self, reply: ReplyTo) -> None:
        """Take a reply."""

    def fail(self, error: EngineDeadError) -> None:
        """Take the error with which the call ends."""


class Exchange:
    """Receivers by the numbers of their calls."""

    def __init__(self) -> None:
        self._receivers: dict[int, Receiver] = {}
        self._new_number = itertools.count()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __bool__(self) -> bool:
        return bool(self._receivers)

    def __contains__(self, number: object) -> bool:
        return number in self._receivers

    def open(self, receiver: Receiver) -> int:
        """Return the number of a new call."""
        number = next(self._new_number)
        self._receivers[number] = receiver
        self._is_empty.clear()
        return number

    def forget(self, number: int) -> bool:
        """Drop later replies; return whether the call was pending."""
        was_open = self._receivers.pop(number, None) is not None
        if not self._receivers:
            self._is_empty.set()
        return was_open

    def receive(self, reply: ReplyTo) -> None:
        """Hand over a reply, whose receiver may have left."""
        if receiver := self._receivers.get(reply.number):
            if reply.is_last:
                self.forget(reply.number)
            receiver.receive(reply)

    def fail(self, number: int, error: EngineDeadError) -> None:
        """Have a call end with an error, unless it has ended."""
        if receiver := self._receivers.get(number):
            self.forget(number)
            receiver.fail(error.fresh())

    def fail_all(self, error: EngineDeadError) -> None:
        """Have all calls end with an error."""
        for number in list(self._receivers):
            self.fail(number, error)

    async def wait_until_empty(self) -> None:
        """Wait until no call is pending."""
        await self._is_empty.wait()


class Arrivals:
    """Wakes the reader of a call when replies have come, or raises the error with which the call ended."""

    def __init__(self) -> None:
        # None once it is raised: its traceback holds frames that hold this object.
        self._error: Exception | None = None
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Note that replies have come."""
        self._event.set()

    def fail(self, error: Exception) -> None:
        """Have the next `wait` raise an error."""
        self._error = error
        self._event.set()

    async def wait(self) -> None:
        """Wait for replies that have come since the last call, and raise the error if there is one."""
        await self._event.wait()
        self._event.clear()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None


class PendingReplies(Arrivals):
    """Replies to one call that its reader has not read yet."""

    def __init__(self) -> None:
        super().__init__()
        self._unread: list[ReplyTo] = []

    def receive(self, reply: ReplyTo) -> None:
        self._unread.append(reply)
        self.notify()

    async def read(self) -> list[ReplyTo]:
        """Wait for replies; return all that have come.

        Raises:
            EngineDeadError: no more come.
        """
        await self.wait()
        unread, self._unread = self._unread, []
        return unread


async def ask(exchange: Exchange, send: Callable[[int, AnyCommand], None], command: AnyCommand) -> ReplyTo:
    """Send a command, and return its only reply.

    Raises:
        EngineDeadError: the engine is not there, or dies meanwhile.
    """
    replies = PendingReplies()
    number = exchange.open(replies)
    try:
        send(number, command)
        (reply,) = await replies.read()
        return reply
    finally:
        exchange.forget(number)
