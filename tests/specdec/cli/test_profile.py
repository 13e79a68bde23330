"""`specdec profile`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from specdec.cli.app import main
from specdec.config import DEMO
from specdec.scheduling.rank_values import FILE, read_values


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("SPECDEC_MODEL", "SPECDEC_DRAFT"):
        monkeypatch.delenv(name, raising=False)

    def call(*args: object) -> Result:
        with pytest.raises(SystemExit) as exited:
            main(["profile", *map(str, args)])
        assert isinstance(exited.value.code, int)
        return Result(exited.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "I need a taxi."}\n{"prompt": "Book a train to Cambridge."}\n', encoding="utf-8")
    return file


def test_values_are_measured_and_saved_beside_the_head(run: Run, prompts: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(DEMO / "eagle3", head)
    (head / FILE).unlink()
    given = ("--model", DEMO / "target", "--draft", head, "--prompts", prompts)
    result = run(*given, "--max-tokens", 16, "--json", "--save")
    assert result.code == 0
    assert FILE in result.err
    found = json.loads(result.out)
    assert 0 <= found["calibration_error"] <= 1
    assert found["pass_ms_by_tokens"][0][1] > 0
    assert found["trees"] > 2
    assert read_values(head) == pytest.approx(found["rank_values"], abs=1e-3)


def test_people_get_tables_and_plots(run: Run, prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "profile.png"
    result = run("--draft", "eagle", "--prompts", prompts, "--max-tokens", 16, "--temperature", 1, "--plot", file)
    assert result.code == 0
    for part in ("a pass, by tokens", "6 levels of drafting", "by rank", "confidence", "calibration error 0."):
        assert part in result.out
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_refused_in_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.cli.profile.find_spec", lambda _name: None)
    result = run("--plot", "profile.png")
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert "pip install 'specdec[bench]'" in result.err


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_drafts_without_probabilities_are_refused(run: Run, draft: str) -> None:
    result = run("--draft", draft)
    assert (result.code, result.out) == (2, "")
    assert f"--draft {draft}" in result.err
