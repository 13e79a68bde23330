"""An --out that cannot be written: told before the work, and at its end without a loss of figures."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from specdec.cli.output_files import check_folder
from specdec.train_eagle.evaluation import head_evaluation
from specdec.train_eagle.evaluation.evaluation import Evaluation
from tests import stages


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("prepare", ["--data", "none.jsonl"]),
        ("train", ["--data", "none"]),
        ("evaluate", ["--draft", "none", "--data", "a=none.jsonl"]),
        ("export", ["--draft", "none"]),
    ],
)
def test_a_file_is_refused_before_anything_is_read(
    stage: str, words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(SystemExit) as ended:
            stages.run(stage, ["--model", "none", *words, "--out", out])
        told = f"{stage}: --out {out}: {tmp_path / 'file'} is no folder; name another folder\n"
        assert (ended.value.code, capsys.readouterr().err) == (2, told)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_can_be_made_is_not_made_yet(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "new" / "out"):
        check_folder(folder, "--out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"^--out /proc/out: cannot be written: .*; name another folder$"):
        check_folder(Path("/proc/out"), "--out")


def test_figures_are_printed_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_the_disk(_: Evaluation, __: Path) -> None:
        raise OSError(28, "No space left on device")

    found = Evaluation("m", "d", "float32", 1, [], {"a": [[0.25, 0.5, 0.75]]}, "one machine")
    monkeypatch.setattr(head_evaluation, "evaluate", lambda *_: found)
    monkeypatch.setattr(Evaluation, "save", fill_the_disk)
    with pytest.raises(SystemExit):
        stages.run("evaluate", ["--draft", "eagle", "--data", "a=none.jsonl", "--out", tmp_path / "out"])
    printed = capsys.readouterr()
    assert "0.25" in printed.out
    assert printed.err == f"evaluate: --out {tmp_path}/out: cannot be written: No space left on device\n"
