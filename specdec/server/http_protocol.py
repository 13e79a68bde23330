"""HTTP/1.1 with what uvicorn's protocol lacks: time limits of a connection, and errors in OpenAI's shape."""

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from specdec.openai.errors import ApiError, error_response
from specdec.server.server_settings import ServerSettings


class _Timer:
    """An action that is still to come, unless it is stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], None]) -> None:
        self._loop, self._seconds, self._action = loop, seconds, action
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to wait, unless it waits already."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._action)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class _BatchedWrites:
    """A transport that sends all that is written in one turn of the event loop by one system call.

    An answer is written in parts: head, body, end, or the last events of a stream. A call for each would take most of
    the server's time where answers are short.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._parts.clear()
        self._transport.abort()

    def _flush(self) -> None:
        data = b"".join(self._parts)
        self._parts.clear()
        if data:
            self._transport.write(data)


class HttpProtocol(H11Protocol):
    """A connection.

    It is closed if the headers of a request take too long, from the connection's start or from the request's first
    byte; uvicorn limits the time between requests itself. It is cut if its client does not read: an answer that is
    not taken would be kept for as long as the client likes. Beyond `most` connections new ones are closed: without a
    file descriptor left, nobody would be answered.

    Args:
        own: arguments of uvicorn's protocol.
    """

    def __init__(self, settings: ServerSettings, most: int, **own: Any) -> None:
        super().__init__(**own)
        self._most = most
        self._header_timeout = settings.header_timeout
        self._headers_due = _Timer(self.loop, settings.header_timeout, self._give_up_headers)
        self._reading_due = _Timer(self.loop, settings.send_timeout, lambda: self.transport.abort())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_BatchedWrites(transport, self.loop))  # type: ignore[arg-type]
        if len(self.connections) > self._most:
            self.transport.abort()
        else:
            self._headers_due.start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._headers_due.start()
        else:
            self._headers_due.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_due.stop()
        self._reading_due.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_due.start()

    def resume_writing(self) -> None:
        self._reading_due.stop()
        super().resume_writing()

    def _should_upgrade(self) -> bool:
        # Clients such as JDK's ask for h2c with each request. HTTP lets a server go on with HTTP/1.1, and uvicorn would
        # warn of missing packages for WebSockets.
        return False

    def _give_up_headers(self) -> None:
        if not self.transport.is_closing():
            seconds = self._header_timeout
            self._refuse(ApiError(408, f"the headers did not arrive within {seconds:g} seconds", code="timeout"))

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or has too long headers."""
        self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Answer before there is a request, and close the connection."""
        reply = error_response(error)
        headers = [*reply.raw_headers, (b"connection", b"close")]
        reason = STATUS_PHRASES[reply.status_code]
        head = h11.Response(status_code=reply.status_code, headers=headers, reason=reason)
        # An answer that has begun, or ended, is not followed by another.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for part in (head, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()
