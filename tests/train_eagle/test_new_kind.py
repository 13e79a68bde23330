"""A kind of head that is one module and one entry: recognised, served, inspected, trained, evaluated and exported."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec import LLM, SamplingParams
from specdec.cli.inspection import Inspection
from specdec.draft_heads.formats.head_kinds import KINDS, load_head
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.models.llama import load_llama
from specdec.models.llama_draft import holds_llama
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.data.prepared_data import PreparedData
from specdec.train_eagle.evaluation.accuracy import accuracy
from specdec.train_eagle.training.read_config import read_config
from specdec.train_eagle.training.train_run import TrainingRun
from specdec.train_eagle.training.training_kinds import TRAINING_KINDS
from tests import stages
from tests.fakes import TINY, save_random_llama
from tests.gated_head import GatedHead, GatedKind, GatedTraining
from tests.kernel_sets import TORCH

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KINDS, "_found", dict(KINDS))
    KINDS.register("gated", GatedKind())
    monkeypatch.setitem(TRAINING_KINDS, "gated", GatedTraining())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_random_llama(folder)
    return folder


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Path:
    """A fresh head, saved."""
    torch.manual_seed(1)
    model = load_llama(target, torch.float32, CPU, TORCH)
    fresh = GatedTraining().new(model.weights, None, {})
    KINDS["gated"].save(fresh, tmp_path / "head", {}, torch.float32)
    return tmp_path / "head"


def test_it_is_recognised_and_comes_back_as_it_was(head: Path, target: Path) -> None:
    loaded = load_head(head, load_llama(target, torch.float32, CPU, TORCH).parts, TORCH)
    assert loaded.description.label == "Gated"
    back = loaded.draft.head.module
    assert isinstance(back, GatedHead)
    assert not holds_llama(head)
    written = load_file(head / "model.safetensors")
    assert torch.equal(back.gate.weight, written["gate.weight"])
    query = written["layers.0.self_attn.q_proj.weight"]
    assert torch.equal(back.get_parameter("layers.0.qkv_proj.weight")[: len(query)], query)


def test_it_is_inspected(head: Path, target: Path) -> None:
    seen = Inspection.of(head, target)
    assert seen.facts["recognised"] == "Gated in the layout of official EAGLE"
    assert seen.facts["target"].endswith("fits")
    assert seen.to_json()["kind"] == "Gated"


def test_without_it_the_message_names_the_kinds_that_there_are(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KINDS, "_found", {name: kind for name, kind in KINDS.items() if name != "gated"})
    with pytest.raises(CheckpointError, match=r"no tensor 'hidden_norm.weight' of EAGLE-3, .*'fc.weight' of EAGLE-1/2"):
        Inspection.of(head, None)


@pytest.mark.long
def test_it_drafts_and_its_accuracy_is_measured(head: Path, target: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain, drafted = (LLM(target, draft, dtype="float64", adaptive_drafts=False) for draft in (None, head))
    expected, found = (llm.generate([[5, 6, 7]], params, use_tqdm=False) for llm in (plain, drafted))
    assert found[0].token_ids == expected[0].token_ids
    assert found[0].stats.steps > 0
    assert len(accuracy(drafted, found, 2)) == 2


@pytest.mark.long
def test_it_is_trained_saved_and_exported(target: Path, tmp_path: Path) -> None:
    prepared = PreparedData.begin(tmp_path / "data", {"format": 1}, ["made up"])
    prepared.complete = True
    draw = torch.Generator().manual_seed(2)
    texts = torch.randint(0, TINY["vocab_size"], (12, 16), generator=draw).tolist()
    prepared.add([Sample(text, [i > 4 for i in range(16)]) for text in texts])
    settings = {"model": target, "data": [tmp_path / "data"], "out": tmp_path / "head", "head": "gated", "held_out": 2}
    settings |= {"epochs": 1, "batch_tokens": 64, "unroll": 2, "evaluate_prompts": 2, "mixed_precision": "no"}
    run = TrainingRun(read_config(settings))
    before = run.head.gate.weight.clone()
    run.train()
    assert not torch.equal(run.head.gate.weight, before)
    trained = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(trained["gate.weight"], run.head.gate.weight.bfloat16())
    stages.run("export", ["--run", tmp_path / "head" / "run", "--out", tmp_path / "out", "--model", target])
    stages.run("export", ["--draft", tmp_path / "out", "--out", tmp_path / "again"])
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == ["GatedHeadModel"]
    assert "# Gated head" in (tmp_path / "out" / "README.md").read_text()
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["gate.weight"], trained["gate.weight"])


def test_settings_of_other_kinds_are_refused(tmp_path: Path) -> None:
    settings = {"data": [tmp_path], "out": tmp_path, "head": "gated", "draft_vocab_size": 5}
    with pytest.raises(
        ValueError, match="draft_vocab_size is for eagle3, dflash and dspark heads; leave it out of a run for gated"
    ):
        read_config(settings)
    with pytest.raises(ValueError, match="head is 'gate'; it must be one of eagle, eagle3, dflash, dspark, gated"):
        read_config({**settings, "head": "gate"})
