"""Results are those of a commit."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from specdec.bench import environment


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the package and a file of results, all committed."""
    files = ("specdec/__init__.py", "kernels/code.py", "benchmarks/results/old.json")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "all")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(environment, "PACKAGE", tmp_path / "specdec")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "benchmarks" / "results")
    return tmp_path


def results(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "benchmarks" / "results" / f"{name}.json").read_text())
    return found


def test_a_clean_tree_has_its_results_written(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.write("old", {"rows": [1]})
    # The first one's results are no change for the second.
    report.write("new", {"rows": [2]})
    for name, rows in (("old", [1]), ("new", [2])):
        assert (results(checkout, name)["rows"], results(checkout, name)["uncommitted_changes"]) == (rows, False)
    assert [json.loads(line)["benchmark"] for line in capsys.readouterr().out.splitlines()] == ["old", "new"]


def test_rows_are_printed_under_their_keys_and_written(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.finish("new", {"rounds": 3}, [{"batch": 1, "tok_per_s": 2.5}, {"batch": 8, "tau": 4}])
    *table, last = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in table]
    assert [row for row in cells if row] == [["batch", "tok per s", "tau"], ["1", "2.5", ""], ["8", "", "4"]]
    found = results(checkout, "new")
    assert (found["rounds"], found["rows"]) == (3, [{"batch": 1, "tok_per_s": 2.5}, {"batch": 8, "tau": 4}])
    assert json.loads(last) == found


@pytest.mark.parametrize("changed", ["specdec/__init__.py", "kernels/code.py"])
def test_an_unclean_tree_is_refused(checkout: Path, changed: str, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / changed).write_text("2\n")
    with pytest.raises(SystemExit, match=r"old\.json: not written: the work tree has uncommitted changes; commit them"):
        report.write("old", {"rows": [1]})
    assert (checkout / "benchmarks" / "results" / "old.json").read_text() == "1\n"
    # The figures are not lost.
    assert json.loads(capsys.readouterr().out)["rows"] == [1]


def test_no_committed_result_names_a_folder_of_a_machine() -> None:
    files = sorted(report.RESULTS.rglob("*.json"))
    assert files
    named = {file.name: found for file in files if (found := re.findall(r'"(?:/|~|[A-Z]:\\)[^"]*"', file.read_text()))}
    assert not named
