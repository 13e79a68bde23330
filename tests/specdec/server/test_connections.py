"""Clients that leave, and clients that read slowly; what is written to a connection."""

import asyncio
import re
import resource
from typing import Any

import pytest

from specdec import SamplingParams
from specdec.server.http_protocol import _BatchedWrites
from specdec.server.http_server import HttpServer, raise_file_limit
from specdec.server.server_settings import ServerSettings
from specdec.server.service import Service
from tests.specdec.server.long_requests import CHAT, LONG, opened, wait_until_running
from tests.specdec.server.running import Served


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**LONG, "prompt": "a"}),
        ("/v1/completions", {**LONG, "prompt": ["a", "b"]}),
        ("/v1/chat/completions", CHAT),
    ],
    ids=["completion", "several", "chat"],
)
def test_a_client_that_leaves_frees_its_blocks(server: Served, path: str, body: dict[str, Any], stream: bool) -> None:
    aborted = server.call(server.llm.stats()).aborted
    samples = 3 * (len(body["prompt"]) if "prompt" in body else 1)
    with opened(server, path, {**body, "stream": stream}) as connection:
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        wait_until_running(server, samples)
    server.wait_until_idle()
    assert server.call(server.llm.stats()).aborted == aborted + samples
    page = server.send("GET", "/metrics")[2].decode()
    (counted,) = re.findall(r'vllm:request_success_total{.*finished_reason="abort".*} (.*)', page)
    assert float(counted) >= samples


def test_a_client_that_never_reads_costs_nobody_else(server: Served) -> None:
    with opened(server, "/v1/completions", {**LONG, "prompt": "a", "stream": True, "logprobs": 20}):
        wait_until_running(server, 3)
        status, _, reply = server.send("POST", "/v1/completions", {"prompt": "b", "seed": 1})
        (expected,) = server.offline.generate("b", SamplingParams(seed=1), use_tqdm=False)
        assert (status, reply["choices"][0]["text"]) == (200, expected.text)
    server.wait_until_idle()


def test_an_upgrade_that_the_client_offers_is_ignored_in_silence(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """JDK's HttpClient offers h2c with each request."""
    for protocol in ("h2c", "websocket"):
        offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMA"}
        assert server.send("GET", "/health", headers=offer)[0] == 200
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_idle_connections_stay_open_longer_than_those_of_proxies(engine: Served) -> None:
    """Five seconds, as uvicorn has it, are less than proxies and pools of clients count on."""

    def seconds(settings: ServerSettings) -> float:
        return HttpServer(Service(engine.llm, settings, "tiny")).config.timeout_keep_alive

    assert (seconds(ServerSettings()), seconds(ServerSettings(timeout_keep_alive=7))) == (75, 7)


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 20, 1 << 16),
        (1 << 17, 1 << 20, 1 << 17),
        (1024, resource.RLIM_INFINITY, 1 << 16),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1 << 16),
    ],
)
def test_the_limit_of_open_files_is_raised(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, expected: int
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert raise_file_limit() == expected
    assert asked == ([(expected, hard)] if soft == 1024 else [])


def test_a_limit_of_open_files_that_the_system_keeps_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, limits: tuple[int, int]) -> None:
        raise ValueError(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_file_limit() == 256


def test_writes_of_one_turn_are_sent_at_once_and_in_order() -> None:
    """And nothing is lost where the connection is closed in the same turn."""
    sent: list[bytes | str] = []

    class Transport(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            sent.append(bytes(data))

        def close(self) -> None:
            sent.append("close")

        def abort(self) -> None:
            sent.append("abort")

        def get_extra_info(self, name: str, default: object = None) -> object:
            return name if default is None else default

    async def work() -> None:
        batched = _BatchedWrites(Transport(), asyncio.get_running_loop())
        batched.write(b"head")
        batched.write(b"")
        batched.write(b"body")
        assert sent == []
        await asyncio.sleep(0)
        assert sent == [b"headbody"]
        batched.write(b"end")
        batched.close()
        await asyncio.sleep(0)
        assert sent == [b"headbody", b"end", "close"]
        batched.write(b"lost")
        batched.abort()
        await asyncio.sleep(0)
        assert sent == [b"headbody", b"end", "close", "abort"]
        assert batched.get_extra_info("peername") == "peername"

    asyncio.run(work())
