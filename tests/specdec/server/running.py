"""A server in a thread of the test process, over an engine process of its own."""

import asyncio
import http.client
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from specdec import LLM
from specdec.async_engine.async_llm import AsyncLLM
from specdec.server.http_server import HttpServer, listen
from specdec.server.server_settings import ServerSettings
from specdec.server.service import Service

T = TypeVar("T")
# Seconds after which a test gives up.
PATIENCE = 120


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what happens soon after an answer."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


class Served:
    """An address that is served, and what stands behind it.

    Attributes:
        offline: the same model in this process.
    """

    def __init__(self, port: int, llm: AsyncLLM, loop: asyncio.AbstractEventLoop, offline: LLM) -> None:
        self.port, self.llm, self.loop, self.offline = port, llm, loop, offline

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, work: Coroutine[Any, Any, T], patience: float = PATIENCE) -> T:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(patience)

    def send(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Send a plain request; bytes go as they are. Return status, headers and the decoded body."""
        raw = body if isinstance(body, bytes) else None if body is None else msgspec.json.encode(body)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, raw, {"Content-Type": "application/json", **(headers or {})})
            reply = connection.getresponse()
            text = reply.read()
            found = {name.lower(): value for name, value in reply.getheaders()}
            is_json = found.get("content-type", "").startswith("application/json")
            return reply.status, found, msgspec.json.decode(text) if is_json and text else text
        finally:
            connection.close()

    def wait_until_idle(self) -> None:
        """Check that the engine gives back all blocks, soon."""
        end = time.monotonic() + PATIENCE
        while (held := self.call(self.llm.check_integrity())) != (0, 0):
            assert time.monotonic() < end, f"requests and blocks are left: {held}"
            time.sleep(0.02)

    @contextmanager
    def again(self, **settings: Any) -> Iterator["Served"]:
        """Serve the same engine at another address, with other settings."""
        server_settings = ServerSettings(port=0, **settings)
        service = Service(self.llm, server_settings, "tiny")
        self.call(service.adapters.start())
        server = HttpServer(service)
        bound = listen(server_settings)
        bound.listen()
        done = asyncio.run_coroutine_threadsafe(server.serve(sockets=[bound]), self.loop)
        try:
            yield Served(bound.getsockname()[1], self.llm, self.loop, self.offline)
        finally:
            server.should_exit = True
            done.result(PATIENCE)
            if service.traces is not None:
                service.traces.close()


@contextmanager
def engine_in_thread(llm: AsyncLLM, offline: LLM, patience: float = PATIENCE) -> Iterator[Served]:
    """Start an engine on an event loop in a thread, within some seconds; `Served.again` serves it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    served = Served(0, llm, loop, offline)
    try:
        served.call(llm.start(), patience)
        yield served
    finally:
        served.call(llm.close(), patience)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
