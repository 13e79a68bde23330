"""`specdec serve`, once its options are read."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from specdec.core.garbage import exempt
from specdec.kernels.types.extras import lacking
from specdec.server.server_settings import ServerSettings

if TYPE_CHECKING:
    from specdec.async_engine.async_llm import AsyncLLM

# Exit code of a program that bad input or a failed engine ends.
REFUSED = 2
logger = logging.getLogger(__name__)
# Packages of the extra `serve` by their modules.
_PACKAGES = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "pydantic": "pydantic",
    "prometheus_client": "prometheus-client",
    "zmq": "pyzmq",
    "msgspec": "msgspec",
}


def run(
    model: str | None,
    draft: str,
    settings: Mapping[str, Any],
    shape: Mapping[str, int],
    server: ServerSettings,
    name: str,
    starting: AbstractContextManager[None],
    replicas: "Callable[..., AsyncLLM] | None" = None,
) -> None:
    """Serve until a signal ends this process.

    Args:
        model, draft, settings: as `LLM` takes them.
        shape: bounds of draft trees that differ from the device's default.
        name: the model's name where the settings give none.
        starting: shows that the engine starts, while it does.
        replicas: makes the front end of several engines, by `AsyncLLM`'s arguments; None for one engine.

    Raises:
        ValueError: a package is missing, a setting or file is refused, or the address cannot be had.
    """
    if problem := lacking("specdec serve", "serve", _PACKAGES):
        raise ValueError(problem)

    # Late, because of the packages above, and because torch takes seconds to import.
    from specdec.async_engine.async_llm import AsyncLLM
    from specdec.async_engine.errors import EngineDeadError
    from specdec.server.http_server import listen, serve
    from specdec.server.json_log import log_as_json

    is_json = server.log_format == "json"
    if is_json:
        log_as_json()

    def announce(address: str) -> None:
        exempt()
        text = f"serving {', '.join(server.served_model_name) or name} at {address}"
        if is_json:
            logger.setLevel(logging.INFO)
            logger.info("%s", text)
        else:
            print(f"specdec: {text}", file=sys.stderr, flush=True)

    try:
        # A mistake in the address shows before the model is loaded.
        bound = listen(server)
        llm = (replicas or AsyncLLM)(model, draft, engine_timeout=server.engine_timeout, shape=shape, **settings)
        with _terminable():
            asyncio.run(serve(llm, server, name, bound, starting, announce))
    except (ValueError, OSError, EngineDeadError) as error:
        if not is_json:
            raise ValueError(str(error)) from None
        logger.error("%s", error)
        raise SystemExit(REFUSED) from None


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the program as an exception does, so that the engine process is closed and files are removed."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
