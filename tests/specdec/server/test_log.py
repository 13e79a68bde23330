"""The log of requests: how each ended, in one line that no client can pass for another."""

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.cli.program import _LogFormatter
from tests.specdec.server.long_requests import CHAT, LONG, opened, wait_until_running
from tests.specdec.server.running import Served, wait_until

FORMATTER = _LogFormatter("specdec: %(levelname)s: %(message)s")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Records of the server and of what it runs on."""
    with caplog.at_level(logging.INFO):
        yield caplog


def _line(log: pytest.LogCaptureFixture, of: str) -> str:
    """Wait for the line of a request, which is written behind the answer."""
    found: list[str] = []

    def look() -> bool:
        own = [record for record in log.records if record.name.startswith("specdec.")]
        found[:] = [FORMATTER.format(record) for record in own if of in record.getMessage()]
        return bool(found)

    wait_until(look)
    return found[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**LONG, "prompt": "a"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "a", "ignore_eos": True, "max_output_tokens": 8000}),
    ],
    ids=["completion", "chat", "response"],
)
def test_a_client_that_leaves_is_one_line(
    server: Served, log: pytest.LogCaptureFixture, path: str, body: dict[str, Any], stream: bool
) -> None:
    with opened(server, path, {**body, "stream": stream}) as connection:
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        wait_until_running(server, body.get("n", 1))
    server.wait_until_idle()
    line = _line(log, f"POST {path}")
    pattern = rf"specdec: INFO: POST {path} 499 in [\d.]+ s, request \w+: the client closed the connection"
    assert re.fullmatch(pattern, line)
    assert [record.getMessage() for record in log.records if record.levelno > logging.INFO] == []
    assert [record for record in log.records if record.exc_info] == []


def test_refused_requests_are_logged_with_the_reason(server: Served, log: pytest.LogCaptureFixture) -> None:
    cases: list[tuple[str, str, object, str]] = [
        ("POST", "/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("POST", "/v1/completions", {"prompt": 1.5}, "prompt"),
        ("POST", "/v1/completions", b"{", "not valid JSON"),
        ("POST", "/v1/chat/completions", {"messages": [], "stream": True}, "messages is empty"),
        ("GET", "/v1/models/other-model", None, "not served"),
        ("GET", "/nowhere", None, "Not Found"),
    ]
    for number, (method, path, body, reason) in enumerate(cases):
        name = f"refused-{number}"
        status, _, _ = server.send(method, path, body, {"X-Request-Id": name})
        line = _line(log, f"request {name}")
        assert f" {status} in " in line
        assert reason in line.partition(name)[2]


def test_no_client_writes_a_line_of_its_own(server: Served, log: pytest.LogCaptureFixture) -> None:
    """By the path, by a model's name that the refusal quotes, or by a field that the server does not know."""
    false = "specdec: INFO: GET /health 200"
    server.send("GET", "/x%0A" + false.replace(" ", "%20") + "%0D%1B[2K")
    wanted = json.dumps({"model": f"x\n{false}\u2028\x1b[2K", "prompt": "a", f"y\n{false}": 1}).encode()
    server.send("POST", "/v1/completions", wanted, {"X-Request-Id": "forger"})
    _line(log, "request forger")
    _line(log, "GET /x")
    for record in log.records:
        shown = FORMATTER.format(record)
        assert false not in shown.splitlines()
        assert "\x1b" not in shown


def test_further_lines_of_a_record_are_indented_and_controls_are_escapes() -> None:
    record = logging.makeLogRecord(
        {"levelname": "INFO", "msg": "%s", "args": ("a\nb\r\x1b[1m\x85\u2028é\xa0漢\u3000",)}
    )
    assert FORMATTER.format(record) == "specdec: INFO: a\n    b\\r\\x1b[1m\\x85\\u2028é\xa0漢\u3000"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_stream_that_takes_too_long_says_so_in_its_last_event(
    engine: Served, log: pytest.LogCaptureFixture, path: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {**LONG, "prompt": "a"},
        "/v1/chat/completions": CHAT,
        "/v1/responses": {"input": "a", "ignore_eos": True, "max_output_tokens": 8000},
    }
    # On a loaded machine, the time may be over before the stream has begun.
    for seconds in (0.3, 1.5, 7.5, 37.5):
        with engine.again(request_timeout=seconds) as server:
            with opened(server, path, {**bodies[path], "stream": True}) as connection:
                text = b""
                while not text.endswith(b"}" if text.startswith(b"HTTP/1.1 504 ") else b"\r\n0\r\n\r\n"):
                    part = connection.recv(65536)
                    assert part, "the connection was cut"
                    text += part
            server.wait_until_idle()
        if text.startswith(b"HTTP/1.1 200 "):
            break
    else:
        raise AssertionError("no stream has begun")
    events = [line for line in text.split(b"\n") if line.startswith(b"data: ")]
    if path != "/v1/responses":
        assert events.pop() == b"data: [DONE]"
    error = json.loads(events[-1].removeprefix(b"data: "))
    assert f"took more than {seconds:g} seconds" in json.dumps(error)
    assert " 504 in " in _line(log, f"POST {path}")
