"""Middleware before the routes: request ids, API keys, limits of a body's size and time, and a log of requests."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.errors import ApiError, error_response
from specdec.server.server_settings import ServerSettings

logger = logging.getLogger(__name__)

# Probes and Prometheus have no key. The page is static, and asks for one.
OPEN_PATHS = ("/", "/health", "/ping", "/version", "/metrics")
# A client reads the refusal of its body only after it has sent all of it; so much is taken and thrown away.
_MOST_DISCARDED = 64 << 20
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._keys = [_digest(key.encode(errors="surrogateescape")) for key in settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        headers = Headers(scope=scope)
        name = _request_id(headers.get("x-request-id", ""))
        scope.setdefault("state", {})["request_id"] = name

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        is_head = scope["method"] == "HEAD"
        # Probes ask for the head of what GET answers.
        inner = {**scope, "method": "GET"} if is_head else scope

        try:
            self._check_key(headers, scope["path"].removeprefix(scope.get("root_path", "")))
            body = await self._body(headers, receive)
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_id)
        else:
            await self._app(inner, _again(body, receive), send_with_id)
        finally:
            seconds = time.perf_counter() - began
            method, path = scope["method"], scope["path"]
            fields = {"request_id": name, "method": method, "path": path, "status": status, "seconds": seconds}
            logger.info("%s %s %d in %.3f s, request %s", method, path, status, seconds, name, extra=fields)

    def _check_key(self, headers: Headers, path: str) -> None:
        if not self._keys or path in OPEN_PATHS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Headers are decoded as Latin-1, whatever the client meant.
        given = _digest(key.strip().encode("latin-1"))
        # All keys are compared, and each in constant time.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body.

        Raises:
            ApiError: 413, too large; 408, too slow.
        """
        most = self._settings.max_request_size
        too_large = ApiError(413, f"the body has more than {most} bytes; send less", code="request_too_large")
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > max(most, _MOST_DISCARDED):
            raise too_large
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the client closed the connection before its body was complete")
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    else:
                        parts.clear()
                    if size > max(most, _MOST_DISCARDED):
                        raise too_large
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            seconds = self._settings.body_timeout
            raise ApiError(408, f"the body did not arrive within {seconds:g} seconds", code="timeout") from None
        if size > most:
            raise too_large
        return b"".join(parts)


def _request_id(given: str) -> str:
    """Return the client's id of a request if it is a plain word, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body as one message, and then the messages after it."""
    is_given = False

    async def receive_again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _digest(key: bytes) -> bytes:
    """Return a hash, so that comparing takes the same time for keys of every length."""
    return hashlib.sha256(key).digest()
