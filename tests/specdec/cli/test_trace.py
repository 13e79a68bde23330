"""`specdec trace` and `specdec generate --trace`, run in this process on a tiny checkpoint."""

import io
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from tests.command_line import Result, Run, run_command, unset_variables
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

FIELDS = ["prompt", "step", "seconds", "plain_seconds", "root", "nodes", "output", "pieces"]


@pytest.fixture
def run(tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command with options that suit the tiny model."""
    unset_variables(monkeypatch)

    def call(*args: object, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        options = ["--model", tiny.target, "--dtype", "float64", "--device", "cpu", "--prefill-stretch", 0]
        tree = ["--depth", 2, "--branching", 48, "--nodes", 64, "--max-tokens", 24, "--ignore-eos", "--fixed-drafts"]
        return run_command(capsys, *args, *options, *tree)

    return call


class Blocks(HTMLParser):
    """The texts of a page's scripts by their ids, as a browser finds them, and its policy."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[str, str] = {}
        self.policy = ""
        self._open: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "script":
            self._open = given.get("id") or ""
            self.blocks[self._open] = ""
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.blocks[self._open] += data


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(("command", "option"), [("generate", "--trace"), ("trace", "--output")])
def test_a_file_that_cannot_be_written_in_the_end_leaves_the_answer(
    run: Run, tiny: Tiny, command: str, option: str
) -> None:
    (expected,) = [
        json.loads(line) for line in run("generate", "Hello", "--json", "--draft", tiny.head).out.splitlines()
    ]
    prompt = ["--prompt", "Hello"] if command == "trace" else ["Hello"]
    result = run(command, *prompt, "--draft", tiny.head, option, "/dev/full")
    assert result.code == 2
    assert result.err == f"specdec: {option} /dev/full: cannot be written: No space left on device\n"
    assert result.out.startswith(expected["text"] + "\n\n24 tokens, ")


@pytest.mark.long
def test_the_file_holds_every_step_of_every_answer(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "steps.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n{"prompt": "Bye"}\n')
    result = run("generate", "--draft", tiny.head, "--prompts", prompts, "--trace", file, "--json")
    assert (result.code, result.err) == (0, "")
    answers = [json.loads(line) for line in result.out.splitlines()]
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(list(line) == FIELDS for line in lines)
    for number, answer in enumerate(answers):
        own = [line for line in lines if line["prompt"] == number]
        assert [line["step"] for line in own] == list(range(1 + answer["steps"]))
        assert [token["token"] for line in own for token in line["output"]] == answer["token_ids"]
        assert "".join(piece["text"] for line in own for piece in line["pieces"]) == answer["text"]
    assert any(node["accepted"] for line in lines for node in line["nodes"])


@pytest.mark.long
def test_answers_stand_under_their_prompts_whichever_begins_first(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    """The short prompt's answer begins while the long one is still read."""
    prompts, file, texts = tmp_path / "prompts.jsonl", tmp_path / "steps.jsonl", ["the cat sat on the mat " * 3, "Hi"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    options = ("--prompts", prompts, "--trace", file, "--json", "--long-prefill-token-threshold", 8, "--raw")
    answers = [json.loads(line) for line in run("generate", "--draft", tiny.head, *options).out.splitlines()]
    llm = LLM(tiny.target, draft=None, dtype="float64", device="cpu")
    expected = llm.generate(texts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert [answer["token_ids"] for answer in answers] == [output.token_ids for output in expected]
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["prompt"] == 1
    for number, answer in enumerate(answers):
        own = [line for line in lines if line["prompt"] == number]
        assert [token["token"] for line in own for token in line["output"]] == answer["token_ids"]


@pytest.mark.parametrize("command", ["generate", "trace"])
def test_a_file_that_cannot_be_written(run: Run, tiny: Tiny, tmp_path: Path, command: str) -> None:
    file = tmp_path / "nowhere" / "file"
    words = ("Hello", "--trace", file) if command == "generate" else ("--prompt", "Hello", "-o", file)
    result = run(command, "--draft", tiny.head, *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"specdec: --{'trace' if command == 'generate' else 'output'} {file}: ")
    assert result.err.count("\n") == 1


@pytest.mark.long
def test_the_page_holds_the_answer_and_nothing_that_could_run(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    file, prompt = tmp_path / "trace.html", "</script><script>alert(1)</script><!-- \N{SNOWMAN}"
    result = run("trace", "--draft", tiny.head, "--prompt", prompt, "-o", file, "--raw")
    assert (result.code, result.err) == (0, ""), result
    assert result.out.endswith(f"and 1 from the prompt pass; cut at --max-tokens 24\n{file}\n")
    found = Blocks()
    found.feed(file.read_text(encoding="utf-8"))
    assert set(found.blocks) == {"recorded", ""}
    assert "alert" not in found.blocks[""]
    recorded = json.loads(found.blocks["recorded"])
    assert set(recorded) == {"model", "prompt", "steps", "end"}
    assert recorded["end"] == "cut at --max-tokens 24"
    assert (recorded["model"], recorded["prompt"]) == (tiny.target.name, prompt)
    assert sum(len(step["output"]) for step in recorded["steps"]) == 24
    assert list(recorded["steps"][0]) == FIELDS[2:]
    assert found.policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in found.policy


@pytest.mark.long
def test_the_prompt_may_come_from_standard_input(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "trace.html"
    assert run("trace", "--draft", tiny.head, "-o", file, stdin="Hello\n").code == 0
    assert '"prompt": "Hello"' in file.read_text()
