"""`specdec profile`."""

import json
import shutil
from pathlib import Path

import pytest

from specdec.config import DEMO
from specdec.scheduling.rank_values import FILE, read_values
from tests.command_line import Result, Run, run_command, unset_variables
from tests.specdec.tiny_checkpoints import Tiny


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    unset_variables(monkeypatch)

    def call(*args: object) -> Result:
        return run_command(capsys, "profile", *args)

    return call


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "I need a taxi."}\n{"prompt": "Book a train to Cambridge."}\n', encoding="utf-8")
    return file


@pytest.mark.long
def test_values_are_measured_and_saved_beside_the_head(run: Run, prompts: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(DEMO / "eagle3", head)
    (head / FILE).unlink()
    given = ("--model", DEMO / "target", "--draft", head, "--prompts", prompts)
    result = run(*given, "--max-tokens", 16, "--json", "--save")
    assert result.code == 0
    assert FILE in result.err
    found = json.loads(result.out)
    assert found["pass_ms_by_tokens"][0][1] > 0
    assert found["trees"] > 2
    assert read_values(head) == pytest.approx(found["rank_values"], abs=1e-3)


@pytest.mark.long
def test_people_get_tables(run: Run, prompts: Path) -> None:
    result = run("--draft", "eagle", "--prompts", prompts, "--max-tokens", 16, "--temperature", 1)
    assert result.code == 0
    for part in ("a pass, by tokens", "6 levels of drafting", "by rank"):
        assert part in result.out


@pytest.mark.parametrize("draft", ["none", "ngram", "auto"])
def test_drafts_without_a_model_are_refused(run: Run, tiny: Tiny, draft: str) -> None:
    """No head is known for the model, so "auto" is n-grams."""
    result = run("--model", tiny.target, "--draft", draft)
    assert (result.code, result.out) == (2, "")
    assert result.err.endswith(
        f"specdec: --draft {draft}: no draft model, so nodes have no ranks; give a head or a small model\n"
    )
