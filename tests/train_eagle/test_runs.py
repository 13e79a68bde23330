"""Recipes under runs/: scripts that bash can read, of commands that exist, with settings that train takes."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from specdec.train_eagle import program
from specdec.train_eagle.read_config import read_config

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
