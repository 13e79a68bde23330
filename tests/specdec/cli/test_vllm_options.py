"""Command lines of `vllm serve`, given to `specdec serve`."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.app import main

Run = tuple[str | None, str, dict[str, Any], dict[str, int]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """What would be served: target, draft, settings and shape."""
    found: list[Run] = []
    for name in ("SPECDEC_MODEL", "SPECDEC_DRAFT", "SPECDEC_API_KEY", "SPECDEC_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("specdec.server.command.run", lambda *arguments: found.append(arguments[:4]))
    return found


def _serve(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *map(str, arguments)])
    assert ended.value.code == 0


CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 4096}}
SAME: list[tuple[list[object], list[object]]] = [
    (["m", "--max_model_len", 64, "--kv_cache_dtype=int8"], ["m", "--max-model-len", 64, "--kv-cache-dtype=int8"]),
    (["m", "-tp", 2, "-pp=2"], ["m", "--tensor-parallel-size", 2, "--pipeline-parallel-size", 2]),
    (["m", "-q", "q8"], ["m", "--quantization", "q8"]),
    (["m", "-sc", '{"method": "ngram"}'], ["m", "--speculative-config", '{"method": "ngram"}']),
    (["m", '-sc={"method": "ngram"}'], ["m", "--speculative-config", '{"method": "ngram"}']),
    (
        ["m", "--speculative-config.method", "eagle3", "-sc.model=h", "--speculative_config.num-speculative-tokens", 3],
        ["m", "--speculative-config", '{"method": "eagle3", "model": "h", "num_speculative_tokens": 3}'],
    ),
    (
        [
            *("m", "--kv-transfer-config.kv_connector=OffloadingConnector"),
            *("--kv-transfer-config.kv_connector_extra_config.cpu_bytes_to_use", 4096),
        ],
        ["m", "--kv-transfer-config", json.dumps(CONNECTOR)],
    ),
    (["m", "--enable_prefix_caching"], ["m", "--enable-prefix-caching"]),
    (["m", "--no_enable_prefix_caching"], ["m", "--no-enable-prefix-caching"]),
]
NOTHING: list[list[object]] = [
    ["--trust-remote-code"],
    ["--enable-chunked-prefill"],
    ["--enable_chunked_prefill=true"],
    ["--disable-log-requests"],
    ["--no-enable-log-requests"],
    ["--disable-log-stats"],
    ["--disable-uvicorn-access-log"],
    ["--load-format", "auto"],
    ["--tokenizer-mode=auto"],
    ["--data-parallel-size", 1],
    ["-dp", 1],
    ["--disable-custom-all-reduce", "--cpu-offload-gb", 0],
]
REFUSED: list[tuple[list[object], str]] = [
    (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill is False, which is not supported; long prompts are"),
    (["--load-format", "dummy"], "--load-format is 'dummy', which is not supported; checkpoints are safetensors"),
    (["--data-parallel-size=2"], "--data-parallel-size is 2, which is not supported; an engine is one replica"),
    (["--speculative-config.method=ngram", "-sc", "{}"], "--speculative-config is given as a whole and by its keys"),
    (["--pipeline-depth", 3], "No such option: --pipeline-depth"),
    (["--max_modle_len", 3], "No such option: --max-modle-len"),
    (["--seed", -1], "seed is -1; it must be between 0 and 2^63 - 1"),
]


@pytest.mark.parametrize(("vllm", "own"), SAME, ids=str)
def test_spellings_mean_the_same(runs: list[Run], vllm: list[object], own: list[object]) -> None:
    _serve(*vllm)
    _serve(*own)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("arguments", NOTHING, ids=str)
@pytest.mark.parametrize("is_first", [True, False])
def test_options_without_an_effect_are_taken(runs: list[Run], arguments: list[object], is_first: bool) -> None:
    """Before the model and behind it: a value is not taken for the model, nor the model for a value."""
    _serve(*arguments, "m") if is_first else _serve("m", *arguments)
    _serve("m")
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("arguments", "complaint"), REFUSED, ids=str)
def test_other_options_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[object], complaint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *map(str, arguments)])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert complaint in shown


def test_a_seed_and_a_tokenizer_are_settings_of_the_engine(runs: list[Run]) -> None:
    _serve("m", "--seed", 3, "--tokenizer", "words")
    assert runs[0][:3] == ("m", "auto", {"seed": 3, "tokenizer": Path("words")})
