"""`specdec generate`, run in this process on a tiny checkpoint."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli.app import main
from tests.specdec.cli.generate_run import Result, Run, Terminal
from tests.specdec.tiny_checkpoints import Tiny


@pytest.fixture
def run(tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`specdec generate` with options that suit the tiny model in front of those given."""
    for name in ("SPECDEC_MODEL", "SPECDEC_DRAFT", "SPECDEC_LOG_LEVEL", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setattr("specdec.cli.timed_batch.LEAST_ROUNDS", 1)
    monkeypatch.setattr("specdec.cli.timed_batch.SECONDS", 0.0)

    def call(*args: object, stdin: io.StringIO | None = None) -> Result:
        monkeypatch.setattr(sys, "stdin", stdin or Terminal())
        fixed = ["--model", tiny.target, "--draft", tiny.head, "--dtype", "float64", "--device", "cpu"]
        tree = ["--depth", 2, "--branching", 48, "--nodes", 64, "--max-tokens", 24, "--ignore-eos", "--fixed-drafts"]
        with pytest.raises(SystemExit) as exited:
            main(["generate", *map(str, [*fixed, *tree, *args])])
        assert isinstance(exited.value.code, int)
        return Result(exited.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write a prompts file of these lines; what is no string becomes JSON."""

    def write(*lines: object) -> Path:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
        return file

    return write
