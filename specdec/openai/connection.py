"""The client's end of a request: work that stops when the client goes away, and event streams."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from specdec.openai.errors import ApiError, ClientGoneError, error_reply, note_outcome

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
# A comment, which clients ignore.
_KEEP_ALIVE = b": keep-alive\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], limit: float) -> T:
    """Return the result of the work, or cancel it when the client goes away or the time is over.

    Args:
        receive: the request's, of which the body has been read.
        limit: seconds, 0 for no limit.

    Raises:
        ClientGoneError: the client went away first.
        ApiError: 504, after the time limit.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, timeout=limit or None, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        raise ApiError(504, f"the request took more than {limit:g} seconds; ask for fewer tokens", code="timeout")
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
        # A task holds its error, whose traceback holds this frame: a cycle, if the frame held the task.
        del task, gone, each


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(body: object, name: str | None = None) -> bytes:
    """Return a server-sent event with a JSON body."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the events that end a stream of completions after an error."""
    return event(error_reply(error)) + DONE


class EventStream(Response):
    """An answer of server-sent events.

    It begins with the first event, so an error before that has its own status; a later error is an event. Where no
    event comes for some time, a comment is sent, which begins the answer too: proxies cut silent connections. It waits
    for a client that reads slowly, and closes the generator when the client goes away.

    Args:
        events: encoded events.
        limit: seconds for the whole answer, 0 for no limit.
        interval: seconds without an event after which a comment is sent, 0 for none.
        error_event: makes what ends the answer after an error behind the first event.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], limit: float, interval: float, error_event: Callable[[ApiError], bytes]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._limit, self._interval = events, limit, interval
        self._error_event = error_event
        self._has_begun, self._sent_at, self._sending = False, 0.0, asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_events(send), self._limit)
        except (ApiError, ClientGoneError) as error:
            if not self._has_begun:
                raise
            note_outcome(scope, error)
            if isinstance(error, ClientGoneError):
                # The client is gone: nothing more is sent.
                return
            await send({"type": "http.response.body", "body": self._error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        keeping = asyncio.create_task(self._keep_alive(send)) if self._interval else None
        try:
            async with aclosing(self._events) as events:
                async for part in events:
                    await self._send(send, part)
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for the interval."""
        clock = asyncio.get_running_loop().time
        self._sent_at = clock()
        while True:
            if (left := self._sent_at + self._interval - clock()) <= 0:
                await self._send(send, _KEEP_ALIVE)
            else:
                await asyncio.sleep(left)

    async def _send(self, send: Send, part: bytes) -> None:
        async with self._sending:
            if not self._has_begun:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._has_begun = True
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self._sent_at = asyncio.get_running_loop().time()
