"""An engine process that hangs, and one that has failed for good."""

import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specdec.async_engine.async_llm import AsyncLLM
from specdec.cli.app import main
from specdec.core.engine_stats import EngineStats
from specdec.core.errors import QueueFullError
from specdec.server.server_settings import ServerSettings
from specdec.server.service import Service
from tests.profiles import by_day
from tests.specdec.server.running import PATIENCE, Served
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

METRIC = re.compile(r"^specdec:steps_total{.*} (.*)$", re.MULTILINE)


@contextmanager
def _stopped(engine: Served) -> Iterator[None]:
    """The engine process does nothing, as one that hangs."""
    pid = engine.llm.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_metrics_of_an_engine_that_hangs_are_the_last_known(engine: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.server.service._STATS_TIMEOUT", PATIENCE)
    with engine.again() as server:
        server.send("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3})
        (before,) = METRIC.findall(server.send("GET", "/metrics")[2].decode())
        monkeypatch.setattr("specdec.server.service._STATS_TIMEOUT", 0.05)
        with _stopped(engine):
            # None of these is answered, so a server that asks again waits for all.
            pages = [server.send("GET", "/metrics") for _ in range(3)]
        for status, _, page in pages:
            assert status == 200
            assert METRIC.findall(page.decode()) == [before]
            assert b"http_requests_total{" in page
        monkeypatch.setattr("specdec.server.service._STATS_TIMEOUT", PATIENCE)
        server.send("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3})
        # Not what the engine answers late to a page before.
        (after,) = METRIC.findall(server.send("GET", "/metrics")[2].decode())
        assert float(after) > float(before)


def test_metrics_are_the_last_known_where_a_replica_does_not_answer(
    engine: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: AsyncLLM) -> EngineStats:
        raise QueueFullError("a replica did not answer")

    with engine.again() as server:
        before = METRIC.findall(server.send("GET", "/metrics")[2].decode())
        monkeypatch.setattr(AsyncLLM, "stats", refuse)
        assert METRIC.findall(server.send("GET", "/metrics")[2].decode()) == before != []


def test_pages_of_metrics_that_are_asked_for_at_once_share_an_answer(engine: Served) -> None:
    async def both(service: Service) -> list[bytes]:
        return await asyncio.gather(service.metrics_page(), service.metrics_page())

    pages = engine.call(both(Service(engine.llm, ServerSettings(), "tiny")))
    assert all(METRIC.search(page.decode()) for page in pages)


@pytest.mark.long
@pytest.mark.parametrize("log_format", by_day(["json", "text"], 1))
def test_a_server_whose_engine_failed_for_good_ends_with_an_error(
    folders: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    """Whoever started it, systemd or a container, can start it anew."""
    monkeypatch.setattr("specdec.async_engine.supervisor.MOST_RESTARTS", 0)
    start = AsyncLLM.start

    async def started(llm: AsyncLLM) -> None:
        await start(llm)
        # As uvicorn tells of bytes that are no request.
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)

    monkeypatch.setattr(AsyncLLM, "start", started)
    arguments = ["--draft", "none", "--dtype", "float32", "--kv-cache-memory", 1 << 20, "--port", 0]
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folders.target), *map(str, arguments), "--log-format", log_format])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    reason = "the engine process died (exit code -9); it failed too often, start the program anew"
    if log_format == "text":
        assert lines[1].startswith(f"specdec: serving {folders.target} at http://127.0.0.1:")
        assert lines[-1] == f"specdec: {reason}"
        assert "specdec: WARNING: Invalid HTTP request received." in lines
    else:
        records = [json.loads(line) for line in lines]
        warning, serving = records[:2]
        assert (warning["logger"], warning["level"]) == ("uvicorn.error", "WARNING")
        assert serving["message"].startswith(f"serving {folders.target} at http://127.0.0.1:")
        assert (records[-1]["level"], records[-1]["message"]) == ("ERROR", reason)
