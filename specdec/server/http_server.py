"""The process that listens: its socket, its engine, and its end."""

import asyncio
import resource
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn

from specdec.async_engine.async_llm import AsyncLLM
from specdec.async_engine.errors import EngineDeadError
from specdec.server.app import build_app
from specdec.server.http_protocol import HttpProtocol
from specdec.server.server_settings import ServerSettings
from specdec.server.service import Service

# Seconds that answers get to be sent after their requests were aborted.
_LAST_WORDS = 2
# Most seconds that a collector of traces gets to take what is not sent yet.
_LAST_TRACES = 5
# File descriptors that a server asks the system for, and most connections that wait to be accepted.
_MOST_FILES = 1 << 16
_BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """An HTTP server that lets running requests finish before it ends, up to `grace` seconds."""

    def __init__(self, service: Service) -> None:
        settings, files = service.settings, raise_file_limit()
        # The event loop accepts as many at once as may wait, and logs each one for which no descriptor is left.
        backlog = min(_BACKLOG, files // 8)
        super().__init__(
            uvicorn.Config(
                build_app(service),
                http=cast(type[asyncio.Protocol], partial(HttpProtocol, settings, files - 2 * backlog)),
                backlog=backlog,
                # Requests are logged by ourselves.
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                root_path=f"/{settings.root_path.strip('/')}".rstrip("/"),
                ssl_keyfile=settings.ssl_keyfile,
                ssl_certfile=settings.ssl_certfile,
                # Above the minute for which proxies keep theirs: the side that closes first may lose a request.
                timeout_keep_alive=cast(int, settings.timeout_keep_alive),
                timeout_graceful_shutdown=int(settings.grace) + _LAST_WORDS,
            )
        )
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, wait for running requests, and abort those that take too long."""
        ending = asyncio.create_task(self._abort_late())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _abort_late(self) -> None:
        await asyncio.sleep(self._service.settings.grace)
        await self._service.end_requests()


def raise_file_limit() -> int:
    """Let this process have more open files than the usual 1,024, of which each connection is one; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_FILES
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if wanted > soft:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def listen(settings: ServerSettings) -> socket.socket:
    """Return a socket bound to the settings' address; it does not listen yet.

    Raises:
        ValueError: the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise _cannot_listen(settings, error) from None
    return bound


def _cannot_listen(settings: ServerSettings, error: OSError) -> ValueError:
    place = f"{settings.host}:{settings.port}"
    return ValueError(f"cannot listen on {place}: {error.strerror}; choose another --host or --port")


async def serve(
    llm: AsyncLLM,
    settings: ServerSettings,
    name: str,
    bound: socket.socket,
    starting: AbstractContextManager[None],
    announce: Callable[[str], None],
) -> None:
    """Start the engine and serve it until a signal ends this process.

    Args:
        name: name of the model where the settings give none.
        bound: a bound socket.
        starting: shows that the engine starts, while it does.
        announce: gets the address once requests are answered.

    Raises:
        ValueError: the engine refuses a setting or a file.
        EngineDeadError: the engine does not start, or has failed for good.
    """
    service = Service(llm, settings, name)
    server = HttpServer(service)
    try:
        # A mistake in the certificate shows before the model is loaded.
        _load(server.config)
        with starting:
            await llm.start()
            await service.adapters.start()
        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        try:
            bound.listen()
        except OSError as error:
            # Two servers that start at the same time can both bind.
            raise _cannot_listen(settings, error) from None
        announce(f"{'https' if settings.ssl_keyfile else 'http'}://{shown}:{port}")
        failing = asyncio.create_task(_stop_at_failure(llm, server))
        await server.serve(sockets=[bound])
        if failing.done():
            raise failing.result()
        failing.cancel()
    finally:
        await llm.close()
        bound.close()
        if service.traces is not None:
            closing = threading.Thread(target=service.traces.close, daemon=True)
            closing.start()
            await asyncio.to_thread(closing.join, _LAST_TRACES)


async def _stop_at_failure(llm: AsyncLLM, server: HttpServer) -> EngineDeadError:
    """Stop the server when the engine has failed for good, so that systemd or a container restarts it."""
    error = await llm.failure()
    server.should_exit = True
    return error


def _load(config: uvicorn.Config) -> None:
    """Read the certificate, if there is one.

    Raises:
        ValueError: a file that cannot be read, or is no certificate or key.
    """
    files = {"--ssl-certfile": config.ssl_certfile, "--ssl-keyfile": config.ssl_keyfile}
    for option, path in files.items():
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"{option} {path} cannot be read: {error.strerror}") from None
    try:
        config.load()
    except ssl.SSLError as error:
        named = " and ".join(f"{option} {path}" for option, path in files.items())
        raise ValueError(f"{named} are no PEM certificate and its key: {error.reason or error}") from None
