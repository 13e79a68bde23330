"""Keys, limits and origins: what is answered before a route is reached."""

import asyncio
import json
import logging
import socket
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import cast

import pytest
from openai import APIStatusError, AuthenticationError, OpenAI
from starlette.types import Message, Receive, Scope, Send

from specdec.server.adapters import ServedAdapters
from specdec.server.gate import ADMIN_PATHS, Gate
from specdec.server.metrics import ServerMetrics
from specdec.server.server_settings import ServerSettings
from specdec.server.service import Service
from tests.specdec.server.running import PATIENCE, Served

BODY = {"prompt": "a", "max_tokens": 1}


def test_one_of_the_keys_is_needed(engine: Served) -> None:
    with engine.again(api_key=["first", "sécond", "kà"]) as server:
        for key in ("first", "sécond", "kà"):
            header = {"Authorization": f"Bearer {key}".encode().decode("latin-1")}
            assert server.send("POST", "/v1/completions", BODY, header)[0] == 200
        for header in (None, {"Authorization": "Bearer fir"}, {"Authorization": "Basic first"}, {"Authorization": ""}):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/abort"), ("GET", "/x")):
                status, headers, reply = server.send(method, path, BODY, header)
                assert status == 401
                assert reply["error"]["code"] == "invalid_api_key"
                assert "x-request-id" in headers
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert server.send("GET", path)[0] == 200
        with OpenAI(base_url=f"{server.url}/v1", api_key="third", max_retries=0) as client:
            with pytest.raises(AuthenticationError):
                client.models.list()
            assert [card.id for card in client.with_options(api_key="first").models.list()] == ["tiny"]


@pytest.mark.parametrize("path", ADMIN_PATHS)
def test_a_clients_key_is_no_administrators(engine: Served, path: str) -> None:
    client, admin, wrong = ({"Authorization": f"Bearer {key}"} for key in "kax")
    allowed = {"allow_draft_updates": True, "allow_runtime_lora_updating": True}
    body = {"draft": "", "lora_name": "", "lora_path": "", "lora_int_id": 1}
    with engine.again(api_key=["k"]) as server:
        status, _, reply = server.send("POST", path, body, client)
        assert status == 403
        assert "start the server with --admin-api-key" in reply["error"]["message"]
    for keys, without_key in ((["k"], 401), ((), 401)):
        with engine.again(api_key=keys, admin_api_key=["a"], **allowed) as server:
            assert server.send("POST", path, body)[0] == without_key
            assert server.send("POST", path, body, wrong)[0] == 401
            assert server.send("POST", path, body, client)[0] == (403 if keys else 401)
            # The route answers.
            assert server.send("POST", path, body, admin)[0] in (400, 404)
            assert server.send("GET", "/v1/models", None, admin)[0] == 200
            assert server.send("GET", "/v1/models")[0] == (401 if keys else 200)


def test_many_requests_of_a_client_that_come_at_once_are_taken_by_turns() -> None:
    """Each is some milliseconds of work before the engine has it; another client's waits for few of them."""
    order = list[str]()

    async def app(scope: Scope, _: Receive, __: Send) -> None:
        order.append(scope["client"][0])

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def ask(address: str) -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "client": (address, 1)}
        await gate(scope, receive, send)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for address in ["many"] * 50 + ["few"]:
                group.create_task(ask(address))

    service = SimpleNamespace(
        settings=ServerSettings(), metrics=ServerMetrics("tiny", 64, {}), arriving=set(), is_ending=False
    )
    gate = Gate(app, cast(Service, service))
    asyncio.run(run())
    assert "few" in order[:2]
    assert order.count("many") == 50


@pytest.mark.parametrize(("given", "sent"), [("/prefix", ""), ("prefix/", "/prefix"), ("/prefix", "/prefix")])
def test_behind_a_proxy_the_prefix_is_not_part_of_the_route(engine: Served, given: str, sent: str) -> None:
    """Whether the proxy leaves it in the path or not."""
    # Of a secret's file, the key has the end of its line.
    with engine.again(root_path=given, api_key=["k\n"]) as server:
        assert server.send("GET", f"{sent}/health")[0] == 200
        assert server.send("GET", f"{sent}/v1/models")[0] == 401
        assert server.send("GET", f"{sent}/v1/models", None, {"Authorization": "Bearer k"})[0] == 200


def test_nothing_follows_an_answer_that_was_given_before_the_body(
    engine: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no HTTP behind it ends the connection in silence."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with (
        engine.again(api_key=["k"]) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection,
    ):
        connection.sendall(head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
        connection.sendall(b"zzzz\r\n")
        while connection.recv(65536):
            pass
        assert server.send("GET", "/health")[0] == 200
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_more_connections_than_file_descriptors_allow_are_closed(
    engine: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("specdec.server.http_server.raise_file_limit", lambda: 64)
    # Of these, twice the eight that may wait stay free.
    most = 64 - 2 * (64 // 8)
    with engine.again() as server, ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        kept = [stack.enter_context(socket.create_connection(address, timeout=PATIENCE)) for _ in range(most)]
        with socket.create_connection(address, timeout=PATIENCE) as refused, suppress(ConnectionError):
            assert refused.recv(1) == b""
        for one in kept:
            one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("size", [2000, 10 << 20])
def test_large_bodies_are_refused(engine: Served, size: int) -> None:
    with engine.again(max_request_size=1000) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(APIStatusError) as caught:
            client.completions.create(model="tiny", prompt="a" * size)
        assert caught.value.status_code == 413
        assert caught.value.code == "request_too_large"
        assert server.send("POST", "/v1/completions", BODY)[0] == 200


def _raw(server: Served, *parts: bytes) -> bytes:
    """Send bytes on a connection of its own, and return all of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        for part in parts:
            connection.sendall(part)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found


def test_an_absurd_length_is_refused_before_the_body_comes(server: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 99999999999\r\n\r\n"
    assert _raw(server, head).startswith(b"HTTP/1.1 413 ")


def test_a_body_without_length_is_limited_too(engine: Served) -> None:
    with engine.again(max_request_size=1000) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        reply = _raw(server, head, *[b"400\r\n" + b" " * 1024 + b"\r\n"] * 20, b"0\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 413 ")


def test_a_body_without_end_is_cut_off(engine: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.server.gate._MOST_DISCARDED", 4096)
    with engine.again(max_request_size=1000) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        # The last chunk never comes.
        assert _raw(server, head, *[b"400\r\n" + b" " * 1024 + b"\r\n"] * 5).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come_is_given_up(engine: Served) -> None:
    with engine.again(body_timeout=0.2) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100\r\n\r\n"
        assert _raw(server, head, b"{").startswith(b"HTTP/1.1 408 ")


def test_header_floods_and_no_http_at_all_are_refused(server: Served) -> None:
    flood = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Y: " + b"z" * (1 << 20)
    for text in (flood, b"\x00\xff\r\n\r\n"):
        assert _raw_or_reset(server, text).split(b"\r\n")[0] in (b"HTTP/1.1 400 Bad Request", b"")
    assert server.send("GET", "/health")[0] == 200


@pytest.mark.parametrize("count", [700, 7000])
def test_headers_that_arrive_at_once_are_limited_too(server: Served, count: int) -> None:
    """Asyncio reads up to 256 KiB at a time, which uvicorn does not count if they hold whole headers."""
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + b"X-Y: zzzz\r\n" * count + b"\r\n"
    expected = b"HTTP/1.1 200 OK" if len(head) < 65536 else b"HTTP/1.1 431 Request Header Fields Too Large"
    assert _raw(server, head).split(b"\r\n")[0] == expected


def _raw_or_reset(server: Served, text: bytes) -> bytes:
    try:
        return _raw(server, text)
    except ConnectionError:
        return b""


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_aborted(engine: Served, stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": stream, "n": 4}
    # On a loaded machine, the time may be over before a stream has begun.
    for seconds in (0.3, 1.5, 7.5, 37.5):
        with engine.again(request_timeout=seconds) as server:
            text = _raw(server, _request(body))
            server.wait_until_idle()
        if text.startswith(b"HTTP/1.1 504 "):
            assert json.loads(text.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"
            if not stream:
                return
        else:
            assert text.startswith(b"HTTP/1.1 200 ")
            assert stream
            assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            return
    raise AssertionError("no stream has begun")


def _request(body: dict[str, object]) -> bytes:
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text


def test_browsers_may_call_only_from_origins_that_are_named(engine: Served, server: Served) -> None:
    headers = {"Origin": "http://here", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.send("OPTIONS", "/v1/completions", None, headers)[1]
    with engine.again(allowed_origins=["http://here"], api_key=["k"]) as open_server:
        status, found, _ = open_server.send("OPTIONS", "/v1/completions", None, headers)
        assert status == 200
        assert found["access-control-allow-origin"] == "http://here"
        headers["Origin"] = "http://there"
        assert "access-control-allow-origin" not in open_server.send("OPTIONS", "/v1/completions", None, headers)[1]


def test_our_own_bugs_are_answered_logged_and_counted(
    engine: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> bool:
        raise RuntimeError("a bug")

    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Service, "abort", broken)
    monkeypatch.setattr(ServedAdapters, "get", bug)
    caplog.set_level(logging.INFO, "specdec")
    headers = {"Origin": "http://here", "X-Request-Id": "buggy"}
    with engine.again(allowed_origins=["http://here"]) as server:
        status, found, reply = server.send("POST", "/abort", {"request_id": "x"}, headers)
        assert server.send("GET", "/v1/models/a%20b")[0] == 500
        page = server.send("GET", "/metrics")[2].decode()
    assert (status, reply["error"]["message"]) == (500, "the server failed; its log has the reason")
    assert (found["x-request-id"], found["access-control-allow-origin"]) == ("buggy", "http://here")
    lines = [record.getMessage() for record in caplog.records]
    assert "POST /abort failed, request buggy" in lines
    assert any(line.startswith("POST /abort 500 in ") for line in lines)
    failures = [record for record in caplog.records if record.exc_info]
    assert [str(record.exc_info and record.exc_info[1]) for record in failures] == ["a bug"] * 2
    # The text of the path is the client's.
    assert [vars(record)["path"] for record in failures] == ["/abort", "/v1/models/a%20b"]
    assert 'specdec:http_requests_refused_total{status="500"} 2.0' in page
