"""The end of a server: running requests finish, or are aborted once the grace is over."""

import json
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.specdec.server.raw_client import events
from tests.specdec.server.running import PATIENCE, Served, wait_until

pytestmark = pytest.mark.slow

LONG = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True}


def _send_in_thread(server: Served, body: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    """Send a request and wait until it runs."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(server.send("POST", "/v1/completions", body)))
    before = server.call(server.llm.stats()).queued
    thread.start()
    while server.call(server.llm.stats()).queued == before:
        pass
    return thread, found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_request_that_takes_longer_than_the_grace_is_aborted(engine: Served, stream: bool) -> None:
    with engine.again(grace=0.2) as server:
        before = server.call(server.llm.stats()).generated_tokens
        thread, found = _send_in_thread(server, {**LONG, "stream": stream, "n": 4})
        wait_until(lambda: server.call(server.llm.stats()).generated_tokens > before)
    thread.join(PATIENCE)
    ((status, headers, reply),) = found
    if stream:
        assert status == 200
        *parts, last = events(reply)
        assert parts
        assert not any(choice["finish_reason"] for part in parts for choice in part["choices"])
        error = last["error"]
    else:
        # Not an answer that looks complete, and is cut.
        assert (status, headers["retry-after"]) == (503, "1")
        error = reply["error"]
    assert (error["type"], error["code"]) == ("server_error", "shutting_down")
    assert "shutting down" in error["message"]
    engine.wait_until_idle()


def test_a_request_within_the_grace_finishes_and_no_other_is_taken(engine: Served) -> None:
    with engine.again(grace=PATIENCE) as server:
        thread, found = _send_in_thread(server, {**LONG, "max_tokens": 400})
    thread.join(PATIENCE)
    ((status, _, reply),) = found
    assert (status, reply["choices"][0]["finish_reason"]) == (200, "length")
    assert reply["usage"]["completion_tokens"] == 400
    with pytest.raises(ConnectionError), socket.create_connection(("127.0.0.1", server.port)):
        pass


def test_a_request_whose_body_is_still_arriving_is_told(engine: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    with engine.again(grace=0.2) as server:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
        connection.sendall(head + b"{")
        # The server has read the other one once it answers this.
        assert server.send("GET", "/health")[0] == 200
    with connection:
        reply = connection.recv(65536)
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"shutting_down" in reply


def test_an_idle_server_ends_at_once(engine: Served) -> None:
    # `again` waits for the end for no longer than PATIENCE.
    with engine.again(grace=10 * PATIENCE) as server:
        assert server.send("GET", "/health")[0] == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_https(engine: Served, tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    subject = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*make, *subject], check=True, capture_output=True)
    with engine.again(ssl_keyfile=key, ssl_certfile=certificate) as server:
        context = ssl.create_default_context(cafile=certificate)
        address = f"https://127.0.0.1:{server.port}/v1/models"
        with urllib.request.urlopen(address, context=context, timeout=PATIENCE) as reply:
            assert json.load(reply)["data"][0]["id"] == "tiny"
