"""A client that writes bytes: for requests that no package would send, and many of them at a time."""

import asyncio
import json
from typing import Any

from tests.specdec.server.running import PATIENCE


def post(path: str, body: object) -> bytes:
    """Return a request after whose answer the connection ends; bytes go as they are."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def exchange(port: int, request: bytes, most: int | None = None) -> tuple[int, bytes]:
    """Send a request on a connection of its own, and return status and body of the answer.

    Args:
        most: bytes of the answer after which the client leaves, None to read all of it.

    Returns:
        0 as the status if the head of an answer has not come.
    """
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            await writer.drain()
            reply = await (reader.read() if most is None else reader.read(most))
        except ConnectionError:
            reply = b""
        finally:
            writer.transport.abort()
    head, ended, body = reply.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]) if ended else 0, body


def events(body: bytes) -> list[Any]:
    """Return the bodies of server-sent events, but for the last one, which says that there are no more."""
    *found, done = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert done == b"[DONE]"
    return [json.loads(event) for event in found]
