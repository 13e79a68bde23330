"""Commands in a locale whose encoding lacks characters: no character of theirs or of the model's ends them."""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli.app import main
from tests.command_line import unset_variables
from tests.specdec.tiny_checkpoints import Tiny

PROMPT = "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN} \N{CJK UNIFIED IDEOGRAPH-65E5}" + "x" * 80
Run = Callable[..., tuple[object, str]]


@pytest.fixture(params=["latin-1", "ascii", "cp1251"])
def run(request: pytest.FixtureRequest, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command on the tiny model, whose tokens are all snowmen; returns its exit code and its output."""
    monkeypatch.setattr("specdec.text.text_stream.TextStream.step", lambda *_: "\N{SNOWMAN}")
    monkeypatch.setattr("specdec.text.token_texts.TokenTexts.name", lambda *_: "\N{SNOWMAN}")
    unset_variables(monkeypatch)

    def call(command: str, *args: object, stdin: str = "") -> tuple[object, str]:
        shown = io.BytesIO()
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding=request.param))
        options = ["--model", tiny.target, "--draft", tiny.head, "--dtype", "float64", "--device", "cpu"]
        tree = ["--fixed-drafts", "--prefill-stretch", 0, "--max-tokens", 12, "--ignore-eos"]
        with pytest.raises(SystemExit) as exited:
            main([command, *map(str, [*options, *tree, *args])])
        sys.stdout.flush()
        return exited.value.code, shown.getvalue().decode(request.param, errors="replace")

    return call


@pytest.mark.long
def test_generate(run: Run, tmp_path: Path) -> None:
    code, shown = run("generate", PROMPT)
    assert code == 0
    assert "?" * 12 in shown
    code, shown = run("generate", PROMPT, "--json")
    assert (code, json.loads(shown)["text"]) == (0, "\N{SNOWMAN}" * 12)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": PROMPT}) + "\n" for _ in range(2)))
    code, shown = run("generate", "--prompts", file)
    assert code == 0
    # The header has the prompt, shortened by an ellipsis.
    assert "[2/2] caf" in shown
    assert " ? ?xxx" in shown


def test_chat(run: Run) -> None:
    code, shown = run("chat", stdin=f"{PROMPT}\n/tree\n/stats\n/help\n")
    assert code == 0
    answer, tree = shown.split("\nstep ")
    assert answer == "?" * 12
    assert "'\\u2603' <- the target's own\n" in tree
    assert "\n`-- '\\u2603'" in tree
    assert "?" not in tree


@pytest.mark.long
def test_trace(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "\N{SNOWMAN}.html"
    code, shown = run("trace", "--prompt", PROMPT, "-o", file)
    assert code == 0
    # typer writes UTF-8 where the encoding is ASCII.
    assert re.search("/[?\N{REPLACEMENT CHARACTER}]+.html\n$", shown)
    assert '"text": "\\u2603"' in file.read_text(encoding="utf-8")


def test_inspect(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "\N{SNOWMAN}"
    folder.symlink_to(tiny.head)
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    with pytest.raises(SystemExit) as exited:
        main(["inspect", str(folder), "--model", str(tiny.target)])
    sys.stdout.flush()
    assert exited.value.code == 0
    assert b"tensor" in shown.getvalue()
