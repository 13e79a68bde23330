"""Middleware before the routes: request ids, API keys, turns of clients, limits of a body, log and counts."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from urllib.parse import quote
from weakref import WeakValueDictionary

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.openai.errors import ApiError, error_response, note_outcome, outcome, path_of
from specdec.server.service import Service, shutting_down

logger = logging.getLogger(__name__)

# Probes and Prometheus have no key. The page is static, and asks for one.
OPEN_PATHS = ("/", "/health", "/ping", "/version", "/metrics")
# What names files of this machine, or changes what all clients get.
ADMIN_PATHS = ("/update_draft", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
# As uvicorn limits headers that arrive in several parts.
_MOST_HEADERS = 64 << 10
# A client reads the refusal of its body only after it has sent all of it; so much is taken and thrown away.
_MOST_DISCARDED = 64 << 20
# Of a key as a client sends it, and as a file of a secret has it.
_SPACES = " \t\r\n"
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        settings = service.settings
        self._app, self._service, self._settings, self._metrics = app, service, settings, service.metrics
        self._keys, self._admin_keys = _digests(settings.api_key), _digests(settings.admin_api_key)
        # Held for a turn of the event loop, by client.
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        headers = Headers(scope=scope)
        name, method = _request_id(headers.get("x-request-id", "")), scope["method"]
        # A proxy may leave the prefix in the path, which then has it twice.
        prefix = scope.get("root_path", "")
        if prefix and scope["path"].startswith(2 * prefix + "/"):
            scope["path"] = scope["path"].removeprefix(prefix)
        # A path is decoded, and may hold whatever a client wants to see in the log.
        path = quote(scope["path"], errors="replace")
        fields: dict[str, object] = {"request_id": name, "method": method, "path": path}
        scope.setdefault("state", {})["request_id"] = name

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        is_head = method == "HEAD"
        # Probes ask for the head of what GET answers. The router writes the route that it chose into the scope.
        inner = {**scope, "method": "GET" if is_head else method}

        try:
            _check_headers(headers)
            key = self._checked_key(headers, path_of(scope))
            client = key or (scope.get("client") or ("",))[0]
            scope["state"]["client"] = client
            body = await self._body(headers, receive)
            await self._turn(client)
        except ApiError as error:
            note_outcome(scope, error)
            await error_response(error, path_of(scope))(scope, receive, send_with_id)
        else:
            try:
                await self._app(inner, _again(body, receive), send_with_id)
            except Exception as error:
                # Our own bug: the client is told no more than that.
                failure = ApiError(500, "the server failed; its log has the reason")
                note_outcome(scope, failure)
                logger.error("%s %s failed, request %s", method, path, name, exc_info=error, extra=fields)
                if not status:
                    await error_response(failure, path_of(scope))(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - began
            status, reason = outcome(scope, status)
            route = getattr(inner.get("route"), "path", "none")
            self._metrics.answered(method, route, status, seconds)
            fields |= {"status": status, "seconds": seconds}
            why = f": {reason}" if reason else ""
            logger.info("%s %s %d in %.3f s, request %s%s", method, path, status, seconds, name, why, extra=fields)

    async def _turn(self, client: str) -> None:
        """Wait until this client's earlier requests have passed, one in each turn of the event loop."""
        lock = self._turns.setdefault(client, asyncio.Lock())
        async with lock:
            await asyncio.sleep(0)

    def _checked_key(self, headers: Headers, path: str) -> str:
        """Check the key that a request brings; the administrator's opens every route.

        Returns:
            The key's hash; an empty string if the route needs none.

        Raises:
            ApiError: 401, a missing or wrong key; 403, a client's key for a route that is the administrator's.
        """
        is_admin, has_keys = path in ADMIN_PATHS, bool(self._keys or self._admin_keys)
        if path in OPEN_PATHS or not (has_keys if is_admin else self._keys):
            return ""
        if is_admin and not self._admin_keys:
            raise ApiError(403, "this route needs an administrator's key; start the server with --admin-api-key")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Headers are decoded as Latin-1, whatever the client meant.
        # Anthropic's clients have a header of their own.
        key = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        given = _digest(key.strip(_SPACES).encode("latin-1")) if key else b""
        is_client, is_administrator = _is_one_of(given, self._keys), _is_one_of(given, self._admin_keys)
        if is_client and is_admin and not is_administrator:
            raise ApiError(403, "this route needs an administrator's key, one of --admin-api-key")
        if not (is_client or is_administrator):
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")
        return given.hex()

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body.

        Raises:
            ApiError: 413, too large; 408, too slow; 503, the server ends before all of it is here.
        """
        most = self._settings.max_request_size
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > max(most, _MOST_DISCARDED):
            raise _too_large(most)
        parts, size, limit = list[bytes](), 0, asyncio.timeout(self._settings.body_timeout)
        if self._service.is_ending:
            raise shutting_down()
        self._service.arriving.add(limit)
        try:
            async with limit:
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
                        raise _too_large(most)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            if self._service.is_ending:
                raise shutting_down() from None
            seconds = self._settings.body_timeout
            raise ApiError(408, f"the body did not arrive within {seconds:g} seconds", code="timeout") from None
        finally:
            self._service.arriving.discard(limit)
        if size > most:
            raise _too_large(most)
        return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes; send less", code="request_too_large")


def _check_headers(headers: Headers) -> None:
    """Refuse headers that are too long, however they arrived.

    Raises:
        ApiError: 431.
    """
    size = sum(len(name) + len(value) + len(": \r\n") for name, value in headers.raw)
    if size > _MOST_HEADERS:
        raise ApiError(431, f"the headers have {size} bytes; send at most {_MOST_HEADERS}")


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


def _is_one_of(given: bytes, keys: Sequence[bytes]) -> bool:
    """Compare with all keys, and with each in constant time."""
    return sum(hmac.compare_digest(given, known) for known in keys) > 0


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [_digest(key.strip(_SPACES).encode(errors="surrogateescape")) for key in keys]


def _digest(key: bytes) -> bytes:
    """Return a hash, so that comparing takes the same time for keys of every length."""
    return hashlib.sha256(key).digest()
