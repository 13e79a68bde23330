"""The draft `auto` takes the head under heads/ that was made for the target, and says which and why."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig as HubConfig

from specdec.building import named_checkpoints
from specdec.building import resolved_config as resolution
from specdec.building.named_checkpoints import HEADS, shipped_head
from specdec.building.resolved_config import resolved_config
from specdec.draft_heads.llama.llama_config import LlamaConfig
from tests.fakes import edit_json, save_random_head
from tests.specdec.gguf.gguf_writing import TOKENS, random_model, write_gguf
from tests.specdec.tiny_checkpoints import Tiny

NAME = "Maker/Small-1M-Instruct"


@pytest.fixture
def heads(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped heads: one for a model of the tiny target's sizes, one for a GGUF file's."""
    heads = tmp_path / "heads"
    shutil.copytree(tiny.head, heads / "folder-head")
    save_random_head(heads / "gguf-head", vocab_size=len(TOKENS), hidden_size=64)
    for head in heads.iterdir():
        edit_json(head / "config.json", training={"target": NAME})
    for module in (named_checkpoints, resolution):
        monkeypatch.setattr(module, "HEADS", heads)
    return heads


def chosen(caplog: pytest.LogCaptureFixture, model: Path) -> tuple[tuple[Path, Path | None, tuple[str, ...]], str]:
    """Return what drafts for a model, and the line that says it."""
    caplog.clear()
    caplog.set_level("INFO", "specdec")
    config = resolved_config(model, "auto", {})
    (line,) = (record.getMessage() for record in caplog.records)
    return (config.model, config.draft, config.chains), line


@pytest.mark.parametrize(
    "folder", ["Small-1M-Instruct", "small-1m-instruct", "models--Maker--Small-1M-Instruct/snapshots/0123abc"]
)
def test_a_folder_is_known_by_its_name(
    tiny: Tiny, heads: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    target = tmp_path / folder
    shutil.copytree(tiny.target, target)
    sources, line = chosen(caplog, target)
    assert sources == (target, heads / "folder-head", ("ngram",))
    shown = NAME if "snapshots" in folder else target
    assert line == (
        f"drafts: {heads / 'folder-head'} and ngram: the shipped head for {NAME}, which {shown} is by its name and "
        "sizes; --draft takes another, or none"
    )


def test_a_gguf_file_is_known_by_its_name_or_its_facts(
    heads: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model("llama")
    named = write_gguf(tmp_path / "Small-1M-Instruct.Q8_0.gguf", model)
    sources, line = chosen(caplog, named)
    assert sources == (named, heads / "gguf-head", ("ngram",))
    assert f"the shipped head for {NAME}, which {named} is by its name and sizes" in line
    link = tmp_path / "link.gguf"
    link.symlink_to(named)
    assert chosen(caplog, link)[0] == (link, heads / "gguf-head", ("ngram",))


def test_sizes_alone_are_a_hint(tiny: Tiny, heads: Path, caplog: pytest.LogCaptureFixture) -> None:
    sources, line = chosen(caplog, tiny.target)
    assert sources == (tiny.target, None, ("ngram",))
    assert line == (
        f"drafts: ngram (prompt lookup), since {tiny.target} names no head. The shipped one for {NAME} fits its sizes: "
        f"if it is that model, give --draft {heads / 'folder-head'},ngram"
    )


def test_a_name_alone_is_nothing(tiny: Tiny, heads: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "Small-1M-Instruct"
    shutil.copytree(tiny.target, target)
    for head in heads.iterdir():
        shutil.copytree(tiny.wide_head, head, dirs_exist_ok=True)
        edit_json(head / "config.json", training={"target": NAME})
    sources, line = chosen(caplog, target)
    assert sources == (target, None, ("ngram",))
    assert line.endswith(f"names no head, and none in {heads} is for it; --draft takes one, or none")
    # An installation from a wheel has none, and says where they are.
    shutil.rmtree(heads)
    assert chosen(caplog, target)[1].endswith("Shipped heads are in specdec's repository alone, under heads/")


@pytest.mark.parametrize(
    ("name", "is_it"),
    [
        *((f"SmolLM2-135M-Instruct{form}", True) for form in ("", "-GGUF", ".i1-Q4_K_M", "-q8_0")),
        *((name, False) for name in ("SmolLM2-135M", "SmolLM-135M-Instruct", "SmolLM2-135M-Instruct-mine", "target")),
    ],
)
def test_the_head_for_smollm2_knows_its_target(tmp_path: Path, name: str, is_it: bool) -> None:
    sizes: dict[str, Any] = {
        **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
        **{"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192},
    }
    folder = tmp_path / name
    HubConfig(**sizes).save_pretrained(folder)
    config = LlamaConfig.from_json(json.loads((folder / "config.json").read_text()))
    found = shipped_head(folder, config)
    assert found == (HEADS / "smollm2-135m-instruct-eagle3", "HuggingFaceTB/SmolLM2-135M-Instruct", is_it)
