"""`specdec generate`, run in this process on a tiny checkpoint."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import Result, Run, run_command, unset_variables
from tests.specdec.cli.generate_run import Terminal
from tests.specdec.tiny_checkpoints import Tiny


@pytest.fixture
def run(tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`specdec generate` with options that suit the tiny model in front of those given."""
    unset_variables(monkeypatch)

    monkeypatch.setattr("specdec.cli.timed_batch.LEAST_ROUNDS", 1)
    monkeypatch.setattr("specdec.cli.timed_batch.SECONDS", 0.0)

    def call(*args: object, stdin: io.StringIO | None = None) -> Result:
        monkeypatch.setattr(sys, "stdin", stdin or Terminal())
        fixed = ["--model", tiny.target, "--draft", tiny.head, "--dtype", "float64", "--device", "cpu"]
        tree = ["--depth", 2, "--branching", 48, "--nodes", 64, "--max-tokens", 24, "--ignore-eos", "--fixed-drafts"]
        return run_command(capsys, "generate", *fixed, *tree, *args)

    return call


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write a prompts file of these lines; what is no string becomes JSON."""

    def write(*lines: object) -> Path:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
        return file

    return write
