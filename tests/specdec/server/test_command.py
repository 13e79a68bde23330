"""`specdec serve` as a process, its options, and its mistakes in one line."""

import gc
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from specdec.async_engine.async_llm import AsyncLLM
from specdec.building.speculative_config import parse_speculative_config
from specdec.cli.app import main
from specdec.server import command
from specdec.server.server_settings import ServerSettings
from tests.specdec.server.command import Command, started
from tests.specdec.server.running import PATIENCE
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

LONG = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the engine process in /proc")
def test_a_server_takes_its_options_and_ends_in_order(folders: Tiny) -> None:
    """One process for all of it, because each takes seconds to start."""
    limits = ["--max-num-seqs", 1, "--max-num-batched-tokens", 64, "--max-queued-requests", 1, "--grace", 0.3]
    draft = ["--speculative-config", json.dumps({"method": "eagle", "model": str(folders.head)})]
    memory = ["--kv-cache-memory", 24 << 20, "--dtype", "float32"]
    with started(folders.target, *limits, *draft, *memory, SPECDEC_API_KEY="k1 k2") as server:
        assert server.send("GET", "/v1/models", key="k2")[2]["data"][0]["id"] == str(folders.target)
        assert server.send("GET", "/v1/models", key="k3")[0] == 401
        _check_full_queue(server)
        found: list[Any] = []
        thread = server.send_in_thread(LONG, found)
        server.wait(lambda: server.metric("vllm:num_requests_running") == 1)
        assert server.metric("vllm:spec_decode_num_drafts_total") > 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM
        thread.join()
        assert (found[0][0], found[0][2]["error"]["code"]) == (503, "shutting_down")


def _check_full_queue(server: Command) -> None:
    found: list[Any] = []
    first = server.send_in_thread(LONG, found)
    server.wait(lambda: server.metric("vllm:num_requests_running") == 1)
    second = server.send_in_thread({**LONG, "max_tokens": 1}, found)
    server.wait(lambda: server.metric("vllm:num_requests_waiting") == 1)
    for stream in (False, True):
        status, headers, reply = server.send("POST", "/v1/completions", {**LONG, "stream": stream})
        assert (status, reply["error"]["code"]) == (503, "queue_full")
        assert int(headers["retry-after"]) >= 1
    # All requests of this client have one id.
    assert server.send("POST", "/abort", {"request_id": "r"})[2] == {"aborted": True}
    first.join()
    second.join()
    assert [status for status, _, _ in found] == [200, 200]


Fails = Callable[..., str]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Run `specdec serve` in this process; return its one line of complaint."""
    for name in ("SPECDEC_MODEL", "SPECDEC_DRAFT", "SPECDEC_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> str:
        with pytest.raises(SystemExit) as exited:
            main(["serve", *map(str, arguments)])
        assert exited.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        return captured.err

    return call


MISTAKES: list[tuple[list[object], str]] = [
    (["--speculative-config", "{"], "must be a JSON object"),
    (["--speculative-config", '{"method": "ngram", "max_lookup": 3}'], "unknown key 'max_lookup'"),
    (["--speculative-config", "{}", "--draft", "ngram"], "exclude each other"),
    (["--port", 70000], "port is 70000"),
    (["--api-key", " "], "api_key holds an empty text"),
    (["--allowed-origins", '["*"]'], "allowed_origins holds '[\"*\"]'; give *, or scheme://host[:port]"),
    (["--allowed-origins", "https://here/"], "allowed_origins holds 'https://here/'"),
    (["--allowed-origins", "https://*.here"], "allowed_origins holds 'https://*.here'"),
    (["--ssl-keyfile", "x"], "belong together"),
    (["--chat-template", "absent.jinja", "--port", 0], "--chat-template is 'absent.jinja': No such file"),
    (["--tool-call-parser", "granite"], "'granite' is not one of 'auto'"),
    (["--scheduling-policy", "random"], "'random' is not one of 'fcfs'"),
    (["--max-queued-requests", 0], "max_queued_requests is 0"),
    (["--depth", 0], "depth is 0"),
    (["--grace", -1], "grace is -1"),
    (["somewhere", "--model", "elsewhere"], "give one of them"),
    (["/nowhere/model", "--port", 0], "/nowhere/model"),
    (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1:8000"),
]


@pytest.mark.parametrize(("arguments", "complaint"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_are_one_line(fails: Fails, arguments: list[object], complaint: str) -> None:
    assert complaint in fails(*arguments)


def test_a_port_that_is_taken_is_one_line(fails: Fails) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another --host or --port" in fails("--port", taken.getsockname()[1])


def test_a_port_that_another_server_takes_while_the_engine_starts_is_one_line(
    fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both can bind it as long as neither listens."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))

        async def start(_: AsyncLLM) -> None:
            other.listen()

        monkeypatch.setattr(AsyncLLM, "start", start)
        port = other.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}: " in fails("--port", port)


@pytest.mark.parametrize("name", ["SPECDEC_API_KEY", "SPECDEC_ADMIN_API_KEY"])
def test_a_key_that_was_never_filled_in_is_refused(fails: Fails, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It would be as none: the server open to all."""
    monkeypatch.setenv(name, " \n")
    assert fails() == f"specdec: {name} is set and holds no key; give one, or unset it\n"


def test_a_spinner_shows_that_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def start(_: AsyncLLM) -> None:
        raise ValueError("the engine does not start")

    monkeypatch.setattr(AsyncLLM, "start", start)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        main(["serve", "--port", "0"])
    shown = capsys.readouterr().err
    assert shown.index("starting the engine") < shown.index("the engine does not start")


def test_a_server_exempts_what_it_has_loaded_from_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []

    async def serve(*given: Any) -> None:
        assert not frozen
        given[-1]("http://127.0.0.1:1")

    monkeypatch.setattr("specdec.server.http_server.serve", serve)
    monkeypatch.setattr("specdec.server.http_server.listen", lambda _: None)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    command.run("m", "none", {}, {}, ServerSettings(), "m", nullcontext(), lambda *_, **__: None)
    assert frozen


def test_missing_packages_are_named_with_the_remedy(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.kernels.types.extras.find_spec", lambda name: None if name == "fastapi" else name)
    assert fails() == "specdec: specdec serve needs fastapi; run: pip install 'specdec[serve]'\n"


def test_the_command_line_does_without_the_servers_packages() -> None:
    code = "import sys, specdec.cli.app; sys.exit(any(name in sys.modules for name in ('fastapi', 'uvicorn', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_server_is_not_open_to_others_by_itself() -> None:
    assert ServerSettings().host == "127.0.0.1"
    assert ServerSettings().allowed_origins == ()


Config = tuple[str, dict[str, int], dict[str, Any]]
CONFIGS: list[tuple[dict[str, Any], Config]] = [
    ({"method": "ngram", "num_speculative_tokens": 4}, ("ngram", {"depth": 4}, {})),
    (
        {"method": "eagle3", "model": "head", "num_speculative_tokens": 3},
        ("head", {"depth": 3}, {"speculative_method": "eagle3"}),
    ),
    ({"model": "head", "draft_tensor_parallel_size": 2}, ("head", {}, {"draft_tensor_parallel_size": 2})),
    ({"method": "draft_model", "model": "small"}, ("small", {}, {"speculative_method": "draft_model"})),
    ({"method": "suffix", "num_speculative_tokens": 8}, ("suffix", {"depth": 8}, {})),
    (
        {"model": "h", "revision": "main", "kv_cache_dtype": "fp8", "enable_adaptive_verification": False},
        ("h", {}, {"draft_revision": "main", "draft_kv_cache_dtype": "fp8", "adaptive_drafts": False}),
    ),
    ({"model": None}, ("ngram", {}, {})),
    ({}, ("ngram", {}, {})),
]


@pytest.mark.parametrize(("config", "wanted"), CONFIGS, ids=str)
def test_vllms_speculative_config(config: dict[str, Any], wanted: Config) -> None:
    assert parse_speculative_config(json.dumps(config), "--speculative-config") == wanted


@pytest.mark.parametrize(
    "config",
    [
        [],
        {"method": "medusa", "model": "x"},
        {"method": "eagle"},
        {"method": "eagle", "model": 1},
        {"method": "ngram", "model": "x"},
        {"method": "ngram", "num_speculative_tokens": 0},
        {"method": "ngram", "num_speculative_tokens": True},
        {"method": "ngram", "num_speculative_tokens": 65},
        {"method": "ngram", "draft_tensor_parallel_size": 2},
        {"model": "head", "draft_tensor_parallel_size": 0},
        {"model": "head", "draft_tensor_parallel_size": "2"},
        {"method": "ngram", "Method": "ngram"},
        {"method": "suffix", "model": "x"},
        {"method": ["ngram"]},
        {"model": "head", "enable_adaptive_verification": "yes"},
    ],
    ids=str,
)
def test_wrong_speculative_configs_are_refused(config: Any) -> None:
    with pytest.raises(ValueError, match=r"^--speculative-config "):
        parse_speculative_config(json.dumps(config), "--speculative-config")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rejection_sample_method", "fly"),
        ("rejection_sample_method", "synthetic"),
        ("synthetic_acceptance_length", 2.5),
        ("draft_sample_method", "beam"),
        ("use_heterogeneous_vocab", True),
    ],
)
def test_keys_that_would_change_what_is_served_are_refused_by_name(key: str, value: object) -> None:
    told = re.escape(f"--speculative-config.{key} is {value!r}, which is not supported; ")
    with pytest.raises(ValueError, match=f"^{told}"):
        parse_speculative_config({"model": "head", key: value}, "--speculative-config")


def test_keys_without_effect_are_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "model": "head",
        "attention_backend": "FLASH_ATTN",
        "draft_sample_method": "greedy",
        "rejection_sample_method": "block",
        "moe_backend": None,
    }
    parse_speculative_config(given, "speculative_config")
    wanted = "speculative_config: without effect here: attention_backend, draft_sample_method, rejection_sample_method"
    assert [record.getMessage() for record in caplog.records] == [wanted]
