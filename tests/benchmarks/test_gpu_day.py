"""The first day on a GPU: stages by name or number, what each leaves however it ends, and the exit status."""

import json
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import day, stage
from benchmarks.gpu.stage import Stage

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put Python programs in the place of stages."""

    def place(**sources: str) -> None:
        monkeypatch.setattr(day, "STAGES", tuple(sources))
        monkeypatch.setattr(day, "command_of", lambda name, _: [sys.executable, "-c", sources[name]])

    return place


def test_stages_have_names_and_numbers() -> None:
    assert day.chosen(["all"]) == day.chosen(["2", "all"]) == list(day.STAGES)
    assert day.chosen(["3", "kernels"]) == ["cycle", "kernels"]
    with pytest.raises(ValueError, match=r"^no stage '7'; take \"all\", 1 to 6, or one of: build-and-tests, kernels, "):
        day.chosen(["1", "7"])
    assert day.STAGE_SECONDS <= 9 * 60


PASSING = (
    "import json, os; print('fine');"
    "json.dump({'stage': 'b', 'status': 'passed', 'failures': []}, open(os.environ['OUT'] + '/b.json', 'w'))"
)


def test_the_others_run_where_one_fails(
    programs: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    programs(a="print('before'); raise SystemExit(3)", b=PASSING)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["day", "all"])
    with pytest.raises(SystemExit) as ended:
        day.main()
    assert ended.value.code
    broken, passed = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab")
    assert (broken["status"], broken["failures"]) == ("failed", ["ended with exit status 3"])
    assert broken["log"] == ["before"]
    assert passed["status"] == "passed"
    assert logs_of(tmp_path) == {"a.log": b"before\n", "b.log": b"fine\n"}
    assert "failed: ended with exit status 3" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["day", "2"])
    with pytest.raises(SystemExit) as ended:
        day.main()
    assert not ended.value.code
    # Logs of stages that were called for before stay, and few files come back from a machine that is lent.
    assert logs_of(tmp_path) == {"a.log": b"before\n", "b.log": b"fine\n"}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "b.json", "logs.tar"]


def logs_of(out: Path) -> dict[str, bytes]:
    with tarfile.open(out / "logs.tar") as logs:
        return {member.name: logs.extractfile(member).read() for member in logs}  # type: ignore[union-attr]


def test_stages_share_the_seconds_of_all(
    programs: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the first one leaves is the others'; none has more than its limit."""
    programs(a="", b="", c="")
    given, clock = list[int](), iter([0, 0, 30, 800])

    def run_stage(name: str, out: Path, _: object, seconds: int) -> dict[str, Any]:
        (out / f"{name}.log").touch()
        given.append(seconds)
        return {"stage": name, "status": "passed", "failures": [], "seconds": 0}

    monkeypatch.setattr(day, "run_stage", run_stage)
    monkeypatch.setattr(day, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["day", "all", "--seconds", "900"])
    with pytest.raises(SystemExit):
        day.main()
    assert given == [300, 435, 100]
    monkeypatch.setattr(sys, "argv", ["day", "all", "--seconds", "179"])
    with pytest.raises(SystemExit):
        day.main()
    assert "--seconds 179 is less than 60 a stage; raise it, or name fewer stages" in capsys.readouterr().err


def test_a_stage_that_hangs_is_stopped_with_its_children(programs: Callable[..., None], tmp_path: Path) -> None:
    """Its JSON of an earlier run is not taken for this one's."""
    (tmp_path / "a.json").write_text('{"stage": "a", "status": "passed", "failures": []}')
    programs(a="import subprocess; subprocess.run(['sleep', '3600'])")
    start = time.monotonic()
    document = day.run_stage("a", tmp_path, {}, 2)
    assert time.monotonic() - start < 600
    assert (document["status"], document["failures"]) == ("failed", ["stopped after 2 s"])
    assert json.loads((tmp_path / "a.json").read_text()) == document


def run_here(run: Callable[[Stage], Any], out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """Run a stage in this process; return its exit status and its document."""
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.some_stage", SimpleNamespace(run=run))  # type: ignore[arg-type]
    monkeypatch.setattr(stage, "day_device", lambda: CPU)
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setattr(sys, "argv", ["stage", "some-stage", "100"])
    with pytest.raises(SystemExit) as ended:
        stage.main()
    return int(ended.value.code or 0), json.loads((out / "some-stage.json").read_text())


def test_findings_before_an_error_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(stage: Stage) -> None:
        stage.figures["rows"] = [1]
        assert json.loads((tmp_path / "some-stage.json").read_text())["status"] == "unfinished"
        raise RuntimeError("device-side assert")

    status, document = run_here(run, tmp_path, monkeypatch)
    assert status == 1
    assert (document["status"], document["rows"]) == ("failed", [1])
    assert document["failures"] == ["RuntimeError: device-side assert"]
    assert document["rehearsal"] is True
    assert document["torch"] == torch.__version__
    assert capsys.readouterr().out.splitlines()[-1] == "failed: RuntimeError: device-side assert"


def test_a_stage_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, document = run_here(lambda stage: stage.show("fine"), tmp_path, monkeypatch)
    assert (status, document["status"], document["failures"]) == (0, "passed", [])


def test_a_copied_tree_has_the_commit_it_was_copied_from(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.bench import environment

    found = {"processor": "p", "commit": None, "uncommitted_changes": None}
    monkeypatch.setattr(environment, "environment", lambda *_: dict(found))
    monkeypatch.setenv("COMMIT", "abc1234")
    assert stage.circumstances()["commit"] == "tree of abc1234"
    found |= {"commit": "def5678", "uncommitted_changes": False}
    assert stage.circumstances()["commit"] == "def5678"
    found["uncommitted_changes"] = True
    assert stage.circumstances()["commit"] == "tree of def5678"


def program(tmp_path: Path, seconds: float) -> Stage:
    return Stage("a", CPU, tmp_path, time.monotonic() + seconds)


def test_programs_of_a_stage_run_without_their_tool_in_a_rehearsal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = "import os; print(os.environ['WORD']); raise SystemExit(5)"
    found = program(tmp_path, 60).run_program(["-c", source], tool=("no-such-tool", "--option"), WORD="said")
    assert found == (5, ["said"])
    assert "rehearsal, without: no-such-tool --option" in capfd.readouterr().out
    assert program(tmp_path, 0.5).run_program(["-c", "import time; time.sleep(60)"]) == (None, [])
