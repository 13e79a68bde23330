"""Calls of an HTTP application in its own process, without a socket between."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message


async def call(
    app: ASGIApp, path: str, body: Mapping[str, Any], request_id: str | None
) -> AsyncGenerator[tuple[int, bytes]]:
    """Post JSON to a route; yield the answer's HTTP status with its next bytes, as they come.

    Closing the generator is a client's leaving.

    Args:
        request_id: the request's name in logs and in the answer; None for one that the application makes.
    """
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if request_id is not None:
        headers.append((b"x-request-id", request_id.encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }
    # An answer waits for its reader, as it waits for a socket.
    messages = asyncio.Queue[Message](1)
    is_asked, has_left = False, asyncio.Event()

    async def receive() -> Message:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            return {"type": "http.request", "body": data, "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    running = asyncio.ensure_future(app(scope, receive, messages.put))
    status = 0
    try:
        while True:
            next_one = asyncio.ensure_future(messages.get())
            await asyncio.wait({next_one, running}, return_when=asyncio.FIRST_COMPLETED)
            if not next_one.done():
                next_one.cancel()
                # Raises what the application has raised.
                await running
                return
            message = next_one.result()
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                if message.get("body"):
                    yield status, message["body"]
                if not message.get("more_body", False):
                    await running
                    return
    finally:
        has_left.set()
        if not running.done():
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
