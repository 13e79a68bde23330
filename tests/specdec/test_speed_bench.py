"""SPEED-Bench's files: `speed_bench.jsonl` has their form, and texts of our own."""

import json
from pathlib import Path

import pytest

from specdec.bench.prompt_file import PLACEHOLDER, GivenPrompt, read_prompt_file
from specdec.cli.app import main
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow
FILE = Path(__file__).parent / "speed_bench.jsonl"
KINDS = {"coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization"}
KINDS |= {"writing"}
# The throughput sets have other kinds, and texts of one length.
ENTROPIES = ("low_entropy", "mixed", "high_entropy")


def test_the_first_turn_of_each_line_is_the_prompt() -> None:
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    assert any(len(line["messages"]) > 2 for line in lines)
    firsts = [line["messages"][0] for line in lines]
    assert read_prompt_file(FILE, False, "--dataset", is_dataset=True) == [
        GivenPrompt(first["content"], [first], line["category"], f"{FILE}, line {number}")
        for number, (first, line) in enumerate(zip(firsts, lines, strict=True), 1)
    ]
    # `generate --prompts` answers the conversation as it stands.
    for prompt, line in zip(read_prompt_file(FILE, False, "--prompts"), lines, strict=True):
        assert (prompt.messages, prompt.text) == (line["messages"], line["messages"][-1]["content"])


@pytest.mark.long
def test_figures_are_told_for_each_kind(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", tiny.target, "--draft", tiny.head, "--dataset", FILE, "--dtype", "float64", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "acceptance", *map(str, arguments), "--max-tokens", "4", "--ignore-eos", "--max-num-seqs", "4"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prompts"] == len(KINDS)
    for mode in document["modes"]:
        assert set(mode["categories"]) == KINDS
        assert all(figures["prompts"] == 1 for figures in mode["categories"].values())
        assert all(figures["tau"] >= 1 for figures in mode["categories"].values())


def test_throughput_sets_have_figures_by_entropy(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text = tmp_path / "throughput_1k.jsonl", "of the same length " * 5
    lines = [{"category": kind, "messages": [{"role": "user", "content": text + kind}]} for kind in ENTROPIES * 2]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--model", tiny.target, "--dataset", file, "--dtype", "float64", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "throughput", *map(str, arguments), "--max-tokens", "4", "--rounds", "1", "--num-prompts", "1"])
    assert ended.value.code == 0
    (plain,) = json.loads(capsys.readouterr().out)["modes"]
    assert {kind: figures["prompts"] for kind, figures in plain["categories"].items()} == dict.fromkeys(ENTROPIES, 1)


def test_a_text_that_was_not_fetched_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "qualitative.jsonl"
    turns = [f"{PLACEHOLDER} FROM THE SOURCE USING SPECDEC_BENCH"]
    file.write_text(FILE.read_text() + json.dumps({"category": "qa", "turns": turns}) + "\n")
    with pytest.raises(ValueError, match=r"line 12: the prompt is a placeholder of SPEED-Bench; write the texts with"):
        read_prompt_file(file, False, "--dataset")
