"""Recipes under runs/: scripts that bash can read, of commands that exist, with settings that train takes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from specdec.config import DEMO
from specdec.train_eagle import program
from specdec.train_eagle.training.read_config import read_config

pytestmark = pytest.mark.slow

RUNS = Path(__file__).parents[2] / "runs"
SCRIPTS = sorted(RUNS.glob("*.sh"))
SETTINGS = sorted(RUNS.glob("*.yaml"))
STAGES = ("regenerate", "prepare", "train", "evaluate", "export")


def test_the_recipes_are_found() -> None:
    assert {file.name for file in SCRIPTS} >= {"demo.sh", "llama-3.1-8b.sh"}
    kinds = ("demo-eagle", "demo-eagle3", "demo-dspark", "llama-3.1-8b-eagle3")
    assert {file.name for file in SETTINGS} >= {f"{kind}.yaml" for kind in kinds}


@pytest.mark.parametrize("file", SETTINGS, ids=lambda file: file.name)
def test_settings_are_those_of_training(file: Path) -> None:
    config = read_config(yaml.safe_load(file.read_text()))
    assert config == read_config({}, file)
    assert config.head == file.stem.rsplit("-", 1)[1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_a_script_is_bash_and_names_files_that_exist(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text().replace("$kind", "eagle3")
    named = re.findall(r"(?:runs|benchmarks)/[\w./-]+\.(?:py|yaml|md|jsonl)", text)
    assert named
    assert all((RUNS.parent / name).is_file() for name in named)


@pytest.mark.parametrize("stage", STAGES)
def test_a_script_gives_options_that_its_stages_have(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main([stage, "--help"])
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    for script in SCRIPTS:
        commands = re.findall(rf"-m specdec\.train_eagle\.{stage} ((?:.*\\\n)*.*)", script.read_text())
        assert commands, script
        assert all(set(re.findall(r"(?<=\s)--[\w-]+", f" {command}")) <= known for command in commands), script


@pytest.mark.long
def test_a_model_writes_questions_to_itself(tmp_path: Path) -> None:
    """Each is a conversation that regenerate can answer, once, and some begin as asked for."""
    out = tmp_path / "questions.jsonl"
    command = [sys.executable, RUNS / "draw_questions.py", "--model", DEMO / "target", "--out", out]
    done = subprocess.run(
        [*command, "--number", "40", "--max-tokens", "64"], check=True, capture_output=True, text=True
    )
    conversations = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert f"{len(conversations)} of 40 questions" in done.stdout
    assert all([turn["role"] for turn in turns] == ["user", "assistant"] for turns in conversations)
    questions = [turns[0]["content"] for turns in conversations]
    assert 10 < len(questions) == len(set(questions))
    assert any(question.startswith(("What", "Where", "Explain", "Summarize:")) for question in questions)
    assert not any("<" in question[:1] for question in questions)


@pytest.mark.long
def test_questions_hold_texts_that_fit(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "A table for two. " * 20}, {"role": "assistant", "content": "Done."}]
    dialogues, out = tmp_path / "dialogues.jsonl", tmp_path / "texts.jsonl"
    short = {"messages": turns[1:]}
    dialogues.write_text("".join(json.dumps(each) + "\n" for each in (short, {"messages": turns}, short)))
    command = [sys.executable, RUNS / "text_questions.py", "--dialogues", dialogues, "--number", "9", "--out", out]
    subprocess.run(command, check=True)
    conversations = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    questions = [turns[0]["content"] for turns in conversations]
    assert all([turn["role"] for turn in turns] == ["user", "assistant"] for turns in conversations)
    assert [question.split("\n\n")[1][:27] for question in questions[:1]] == ["User: A table for two. A ta"]
    # One dialogue is long enough. A third is about code.
    assert len(questions) == 1 + 3
    assert all("def " in question for question in questions[1:])
