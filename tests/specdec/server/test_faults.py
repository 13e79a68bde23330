"""Faults under load: a server process that stays healthy, in bounded memory, without help by hand."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.profiles import by_day
from tests.specdec.server.command import Command, started
from tests.specdec.server.raw_client import events, exchange, post
from tests.specdec.server.running import PATIENCE
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc for processes and their memory"),
]
COMPLETION = "/v1/completions"
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 40, "seed": 1, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 8000}
# Seconds; each limit is waited for.
HEADER_TIMEOUT, SEND_TIMEOUT, ENGINE_TIMEOUT = 2.0, 1.0, 4.0
MIB = 1 << 20
# In /proc/net/tcp.
ESTABLISHED = "01"


@pytest.fixture(scope="module")
def server(folders: Tiny) -> Iterator[Command]:
    limits = {"header": HEADER_TIMEOUT, "send": SEND_TIMEOUT, "engine": ENGINE_TIMEOUT}
    options = [option for name, value in limits.items() for option in (f"--{name}-timeout", value)]
    engine = ["--draft", folders.head, "--kv-cache-memory", 24 << 20, "--dtype", "float32", "--max-num-seqs", 16]
    with started(folders.target, *engine, *options) as server:
        yield server


@pytest.fixture(autouse=True)
def check_health(server: Command) -> Iterator[None]:
    """After each fault the server is idle, and gives the tokens that it gave before."""
    before = _text(server)
    yield
    server.wait(lambda: server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0)
    server.wait(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)
    assert _text(server) == before


def _text(server: Command) -> str:
    status, _, reply = server.send("POST", COMPLETION, SHORT)
    assert status == 200, reply
    return str(reply["choices"][0]["text"])


def _memory(server: Command) -> int:
    """Return the bytes of physical memory that server and engine process hold."""
    pages = sum(
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (server.process.pid, server.engine_pid)
    )
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _all(server: Command, requests: list[bytes]) -> list[tuple[int, bytes]]:
    return await asyncio.gather(*(exchange(server.port, request) for request in requests))


def test_large_bodies_are_thrown_away(server: Command) -> None:
    large = post(COMPLETION, {"prompt": "a" * (10 * MIB)})
    before = _memory(server)
    for status, reply in asyncio.run(_all(server, [large] * 12)):
        assert status == 413
        assert json.loads(reply)["error"]["code"] == "request_too_large"
    assert _memory(server) - before < 100 * MIB


def test_header_floods_are_refused(server: Command) -> None:
    many = b"GET /health HTTP/1.1\r\n" + b"X-Y: z\r\n" * 100_000
    long = b"GET /health HTTP/1.1\r\nX-Y: " + b"z" * MIB
    before = _memory(server)
    for status, reply in asyncio.run(_all(server, [many, long] * 50)):
        # The server closes the connection while the flood goes on, which may take the answer with it.
        assert status in (0, 400)
        assert status == 0 or set(json.loads(reply)) == {"error"}
    assert _memory(server) - before < 50 * MIB


def test_headers_that_do_not_come_are_given_up(server: Command) -> None:
    """Headers that drip too, on a connection that is kept open."""
    half = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    with ThreadPoolExecutor(1) as pool, socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as slow:
        slow.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert slow.recv(10_000).startswith(b"HTTP/1.1 200 ")
        began = time.monotonic()
        dripping = pool.submit(_drip, slow)
        for status, reply in asyncio.run(_all(server, [b"", half] * 50)):
            assert status == 408
            assert json.loads(reply)["error"]["code"] == "timeout"
        assert HEADER_TIMEOUT <= time.monotonic() - began < PATIENCE
        dripping.result()


def _drip(connection: socket.socket) -> None:
    """Send a header without end until the connection is closed."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(0.05)
        try:
            connection.sendall(b"X")
        except ConnectionError:
            return
    raise AssertionError("the connection stays open")


def _reader(server: Command, body: dict[str, Any], into: ExitStack) -> socket.socket:
    """A client whose machine takes little before it reads."""
    connection = into.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(post(COMPLETION, {**body, "stream": True, "logprobs": 20}))
    return connection


@pytest.mark.long
def test_clients_that_never_read_are_cut_off(server: Command) -> None:
    """Each choice begins with the prompt's log-probabilities: more than the system keeps for a connection."""
    body = {**SHORT, "prompt": "a" * 1500, "echo": True, "n": 4}
    with ExitStack() as stack:
        before, queued = _memory(server), server.metric("specdec:requests_queued_total")
        silent = [_reader(server, body, stack) for _ in range(5)]
        server.wait(lambda: server.metric("specdec:requests_queued_total") == queued + 20)
        assert _text(server)
        server.wait(lambda: server.metric("vllm:num_requests_running") == 0)
        assert _memory(server) - before < 400 * MIB
        server.wait(lambda: _connected(server, silent) == 0)
        for connection in silent:
            reply = b"".join(_rest(connection))
            assert reply.startswith(b"HTTP/1.1 200 ")
            assert b"[DONE]" not in reply


def _connected(server: Command, clients: list[socket.socket]) -> int:
    """Return how many clients the server's own end still has a connection to."""
    ports = {client.getsockname()[1] for client in clients}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    pairs = [[int(address.rpartition(":")[2], 16) for address in line[1:3]] for line in lines if line[3] == ESTABLISHED]
    return sum(own == server.port and other in ports for own, other in pairs)


def _rest(connection: socket.socket) -> Iterator[bytes]:
    """Yield what a connection still has, up to its end, in order or not."""
    try:
        while part := connection.recv(1 << 16):
            yield part
    except ConnectionError:
        return


@pytest.mark.long
def test_a_slow_reader_gets_all_of_its_answer(server: Command) -> None:
    body = {**LONG, "max_tokens": 300}
    with ExitStack() as stack:
        connection = _reader(server, body, stack)
        reply = b""
        while part := connection.recv(8192):
            reply += part
            time.sleep(0.005)
    parts = events(reply.partition(b"\r\n\r\n")[2])
    _, _, whole = server.send("POST", COMPLETION, body)
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]


@pytest.mark.long
@pytest.mark.parametrize("fault", by_day([signal.SIGSTOP, signal.SIGKILL], 1), ids=["hangs", "killed"])
def test_the_engine_process_fails_under_load(server: Command, fault: signal.Signals) -> None:
    """Requests end with a clear error, and service is back."""
    reason = {
        signal.SIGKILL: "the engine process died (exit code -9)",
        signal.SIGSTOP: f"the engine process died (no sign of life for {ENGINE_TIMEOUT:g} seconds)",
    }
    before = server.engine_pid

    async def run() -> list[tuple[int, bytes]]:
        requests = [post(COMPLETION, {**LONG, "stream": number % 2 == 0}) for number in range(40)]
        answers = asyncio.ensure_future(_all(server, requests))
        # Some run, and some wait.
        await asyncio.to_thread(server.wait, lambda: server.metric("vllm:num_requests_waiting") == 24)
        os.kill(before, fault)
        return await answers

    for number, (status, reply) in enumerate(asyncio.run(run())):
        assert status in ((200, 503) if number % 2 == 0 else (503,))
        error = (events(reply)[-1] if status == 200 else json.loads(reply))["error"]
        assert error["code"] == "engine_dead"
        assert error["message"] == f"{reason[fault]}; it is being restarted, try again soon"
    assert server.send("GET", "/health")[0] == 503
    server.wait(lambda: server.send("GET", "/health")[0] == 200)
    assert server.engine_pid != before
