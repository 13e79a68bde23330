"""`specdec generate`, run in this process on a tiny checkpoint."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from specdec import LLM, SamplingParams
from specdec.cli import main
from specdec.engine import LLMEngine
from specdec.request import Request
from tests.specdec.conftest import Tiny

KEYS = ["prompt", "text", "token_ids", "finish_reason", "steps", "tau", "accepted_per_depth", "seconds", "tok_per_s"]
COMPARE_KEYS = [*KEYS, "plain_tok_per_s", "speedup", "equal"]
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Run = Callable[..., Result]


@pytest.fixture
def run(tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`specdec generate` with options that suit the tiny model in front of those given."""
    for name in ("SPECDEC_MODEL", "SPECDEC_DRAFT", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def call(*args: object, stdin: io.StringIO | None = None) -> Result:
        monkeypatch.setattr(sys, "stdin", stdin or Terminal())
        fixed = ["--model", tiny.target, "--draft", tiny.head, "--dtype", "float64", "--device", "cpu"]
        tree = ["--depth", 3, "--branching", 16, "--nodes", 32, "--max-tokens", 24, "--ignore-eos"]
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


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Ctrl-C in the step after so many."""
    real, taken = LLMEngine.step, 0

    def step(engine: LLMEngine) -> list[Request]:
        nonlocal taken
        taken += 1
        if taken > steps:
            raise KeyboardInterrupt
        return real(engine)

    monkeypatch.setattr(LLMEngine, "step", step)


def test_json_tells_what_the_library_tells(run: Run, tiny: Tiny) -> None:
    result = run("Hello", "--json")
    (answer,) = result.objects
    assert (result.code, result.err, list(answer)) == (0, "", KEYS)

    llm = LLM(tiny.target, dtype="float64", device="cpu")
    tokens = llm.chat_prompt([{"role": "user", "content": "Hello"}])
    (plain,) = llm.generate(tokens, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert answer["prompt"] == "Hello"
    assert (answer["text"], answer["token_ids"]) == (plain.text, plain.token_ids)
    assert answer["finish_reason"] == "length"
    # The first token comes from the prompt's own pass.
    assert answer["tau"] == 23 / answer["steps"]  # type: ignore[operator]
    assert sum(answer["accepted_per_depth"]) > 0  # type: ignore[call-overload]


def test_streamed_text_is_the_text_of_json(run: Run) -> None:
    (answer,) = run("Hello", "--json").objects
    result = run("Hello")
    text, _, summary = result.out.rpartition("\n\n")
    assert (result.code, result.err) == (0, "")
    assert text == answer["text"]
    assert summary.startswith("24 tokens, ")
    assert f"tau {answer['tau']:.2f}, " in summary
    assert summary.endswith(" accepted tokens per step\n")


def test_a_terminal_shows_where_text_came_from(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (answer,) = run("Hello", "--json").objects
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    legend, answered = run("Hello").out.split("\n\n", 1)
    assert f"{GREEN}accepted from the draft{PLAIN}" in legend
    colours = {}
    green = False
    shown = ""
    for part in answered.rpartition("\n\n")[0].replace(GREEN, "\0G").replace(PLAIN, "\0P").split("\0"):
        green = part[:1] == "G" if part[:1] in "GP" and shown + part != answered else green
        text = part[1:] if shown or part[:1] in "GP" else part
        colours[green] = colours.get(green, "") + text
        shown += text
    assert colours[True]
    assert colours[False]
    assert answer["text"] in shown
