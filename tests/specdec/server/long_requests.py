"""Requests that run while a test does something to them or to their connection."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.specdec.server.running import PATIENCE, Served

LONG = {"max_tokens": 8000, "ignore_eos": True, "n": 3}
CHAT = {**LONG, "messages": [{"role": "user", "content": "a"}]}


@contextmanager
def opened(server: Served, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection on which a request was sent."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + text)
        yield connection


def wait_until_running(server: Served, count: int) -> None:
    while server.call(server.llm.stats()).running < count:
        pass
