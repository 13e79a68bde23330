"""Exported heads: bit-identical when loaded, and laid out exactly as the official ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from specdec import DraftShape
from specdec.cli.inspection import Inspection
from specdec.draft_heads.formats.head_kinds import load_head
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.draft_heads.heads.eagle import EagleHead
from specdec.draft_heads.heads.eagle3 import Eagle3Head
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.models.llama import LlamaModel, load_llama
from specdec.train_eagle.data.prepared_data import PreparedData
from specdec.train_eagle.evaluation.evaluation import Evaluation, Measured
from specdec.train_eagle.training.head_trainer import LossSettings
from specdec.train_eagle.training.training_kinds import TRAINING_KINDS
from specdec.train_eagle.training.training_state import TrainingState
from tests import stages
from tests.fakes import edit_json, save_random_eagle3, save_random_head, save_random_llama
from tests.kernel_sets import TORCH

H, INNER, V, KV, VD = 32, 48, 97, 16, 50
MAPS = {"d2t": torch.int64, "t2d": torch.bool}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of the published checkpoints (SafeAILab/EAGLE), in the sizes of the tests' target.
LAYER = {
    "self_attn.o_proj.weight": [H, H],
    "mlp.gate_proj.weight": [INNER, H],
    "mlp.up_proj.weight": [INNER, H],
    "mlp.down_proj.weight": [H, INNER],
    "post_attention_layernorm.weight": [H],
}
OFFICIAL = {
    "eagle": {
        "embed_tokens.weight": [V, H],
        "fc.weight": [H, 2 * H],
        "layers.0.self_attn.q_proj.weight": [H, H],
        "layers.0.self_attn.k_proj.weight": [KV, H],
        "layers.0.self_attn.v_proj.weight": [KV, H],
        **{f"layers.0.{name}": shape for name, shape in LAYER.items()},
    },
    "eagle3": {
        "fc.weight": [H, 3 * H],
        "midlayer.self_attn.q_proj.weight": [H, 2 * H],
        "midlayer.self_attn.k_proj.weight": [KV, 2 * H],
        "midlayer.self_attn.v_proj.weight": [KV, 2 * H],
        **{f"midlayer.{name}": shape for name, shape in LAYER.items()},
        "midlayer.hidden_norm.weight": [H],
        "midlayer.input_layernorm.weight": [H],
        "norm.weight": [H],
        "lm_head.weight": [VD, H],
        "d2t": [VD],
        "t2d": [V],
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_random_llama(folder, num_hidden_layers=7)
    return folder


@pytest.fixture(scope="module")
def model(target: Path) -> LlamaModel:
    return load_llama(target, torch.float32, torch.device("cpu"), TORCH)


@pytest.fixture(params=["eagle", "eagle3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def save_run(kind: str, folder: Path, target: Path, model: LlamaModel) -> EagleHead | Eagle3Head:
    """A run's state, of a head whose weights bfloat16 cannot hold."""
    torch.manual_seed(3)
    known = torch.randperm(V)[:VD].sort().values
    head: EagleHead | Eagle3Head = TRAINING_KINDS[kind].new(model.weights, known if kind == "eagle3" else None, {})
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.data.uniform_(-1, 1)
    PreparedData.begin(folder.parent / "prepared", {"format": 1}, ["/data/chats.jsonl"])
    data = [str(folder.parent / "prepared")]
    settings = {"model": str(target), "data": data, "head": kind, "lr": 0.002, "unroll": 4}
    trainer = TRAINING_KINDS[kind].trainer(
        head, model.weights.lm_head_weight, LossSettings("ce", 1, 1.0, 1.0, 0.0, 0.0)
    )
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(trainer)
    state = TrainingState(folder, settings, None)
    state.step = 70
    state.save(accelerator)
    return head


def export(*words: object) -> None:
    stages.run("export", words)


def load(folder: Path, model: LlamaModel) -> DraftModel:
    return load_head(folder, model.parts, TORCH).draft


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_is_bit_identical_when_it_is_loaded(
    kind: str, dtype: str, target: Path, model: LlamaModel, tmp_path: Path
) -> None:
    head = save_run(kind, tmp_path / "run", target, model)
    export("--run", tmp_path / "run", "--out", tmp_path / "out", "--dtype", dtype)
    loaded = load(tmp_path / "out", model)
    back = loaded.head.module
    assert back is not None
    assert type(back) is type(head)
    rope = back.llama.rope
    assert (rope.rope_type, rope.theta) == ("default", head.llama.rope.theta)
    assert back.config == replace(head.config, llama=replace(head.llama, rope=rope))
    for name, parameter in back.named_parameters():
        exact = dict(head.named_parameters())[name]
        # The embedding is the target's, of which no official EAGLE-3 file has a copy.
        is_shared = kind == "eagle3" and name == "embed_tokens.weight"
        assert torch.equal(parameter, exact if is_shared else exact.to(DTYPES[dtype]).float()), name
    assert isinstance(loaded.readout, MatrixReadout)
    if kind == "eagle3":
        assert loaded.readout.tokens is not None
        assert torch.equal(loaded.readout.tokens, head.draft_tokens)
    # Once more, from the folder.
    export("--draft", tmp_path / "out", "--out", tmp_path / "again", "--dtype", dtype)
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert tensor.dtype == again[name].dtype == MAPS.get(name, DTYPES[dtype]), name


def test_large_weights_are_written_whole(
    kind: str, target: Path, model: LlamaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products lay large weights out anew and drop the old layout; those of a head to be exported must not."""
    monkeypatch.setattr("specdec.kernels.reference.projection.SMALL_BYTES", 0)
    save_run(kind, tmp_path / "run", target, model)
    export("--run", tmp_path / "run", "--out", tmp_path / "out", "--dtype", "float32")
    export("--draft", tmp_path / "out", "--out", tmp_path / "again", "--dtype", "float32")
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


def test_a_file_has_the_official_names_and_shapes(kind: str, target: Path, model: LlamaModel, tmp_path: Path) -> None:
    head = save_run(kind, tmp_path / "run", target, model)
    export("--run", tmp_path / "run", "--out", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == OFFICIAL[kind]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    recipe = {"head": kind, "lr": 0.002, "unroll": 4, "steps": 70}
    assert config["training"] == {"target": target.name, "data": ["chats.jsonl"], **recipe}
    assert config["torch_dtype"] == "bfloat16"
    if kind == "eagle3":
        # The name that both vLLM and SGLang have for it.
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["draft_vocab_size"] == VD
        # vLLM counts the inputs of layers, SGLang the outputs.
        assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
        assert torch.equal(torch.arange(VD) + tensors["d2t"], head.draft_tokens)
        assert tensors["t2d"].nonzero().flatten().tolist() == head.draft_tokens.tolist()
    else:
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["bias"] is False


def test_a_head_without_layer_ids_takes_its_targets(target: Path, model: LlamaModel, tmp_path: Path) -> None:
    save_run("eagle3", tmp_path / "run", target, model)
    export("--run", tmp_path / "run", "--out", tmp_path / "plain")
    edit_json(tmp_path / "plain" / "config.json", eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    export("--draft", tmp_path / "plain", "--model", target, "--out", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """Front matter and text."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


@pytest.mark.long
def test_the_card_says_what_the_head_is_and_does(kind: str, target: Path, model: LlamaModel, tmp_path: Path) -> None:
    save_run(kind, tmp_path / "run", target, model)
    rows = [
        Measured("maths", 0.0, DraftShape(2, 10, 60), 9, 3.456, [0.7, 0.25], 300, 90),
        Measured("maths", 1.0, DraftShape(3, 3, 8), 9, 2.5, [0.5, 0.125], 300, 120, 50.0, 20.0),
    ]
    evaluation = Evaluation(
        "m", "d", "bfloat16", 128, rows, {"maths": [[0.61, 0.7, 0.8], [0.5, 0.6, 0.7]]}, "a machine"
    )
    evaluation.save(tmp_path)
    (tmp_path / "notes.md").write_text("## Data\n\nMade up: by nobody.\n")
    words = ["--run", tmp_path / "run", "--out", tmp_path / "my-head", "--evaluation", tmp_path / "evaluation.json"]
    export(*words, "--base-model", "me/big: one", "--licence", "mit", "--notes", tmp_path / "notes.md")
    front, text = card(tmp_path / "my-head")
    assert front["base_model"] == "me/big: one"
    assert front["license"] == "mit"
    assert front["library_name"] == "specdec"
    assert kind in front["tags"]
    assert "| maths | 0 | 60 nodes, depth 2 | 3.46 |  | 0.70 0.25 | 9 |" in text
    assert "| maths | 1 | 8 nodes, depth 3 | 2.50 | 2.50 | 0.50 0.12 | 9 |" in text
    assert "Speed is over plain decoding, one request at a time (a machine)." in text
    assert "| maths | top 1 | 0.61 0.50 |" in text
    assert "| `lr` | 0.002 |" in text
    assert "Made up: by nobody." in text
    assert "--draft my-head" in text
    assert f'"method": "{kind}", "model": "my-head"' in text
    # SGLang has no class that official EAGLE-1 heads fill.
    assert ("--speculative-draft-model-path my-head" in text) == (kind == "eagle3")
    assert ("proposes 50 of 97 tokens" in text) == (kind == "eagle3")


def test_the_target_is_named_and_inspect_shows_it(kind: str, target: Path, model: LlamaModel, tmp_path: Path) -> None:
    """Never by a path of this machine; a folder in the hub's cache by its name there."""
    cached = tmp_path / "hub" / "models--org--big-model" / "snapshots" / "0123"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(target)
    for folder, name in ((target, target.name), (cached, "org/big-model")):
        save_run(kind, tmp_path / name / "run", folder, model)
        export("--run", tmp_path / name / "run", "--out", tmp_path / name / "out")
        assert card(tmp_path / name / "out")[0]["base_model"] == name
        assert str(tmp_path) not in (tmp_path / name / "out" / "README.md").read_text()
        seen = Inspection.of(tmp_path / name / "out", None)
        assert seen.facts["trained for"] == seen.to_json()["trained_for"] == name
        assert seen.facts["trained on"] == "chats.jsonl"
    # A name that is given holds for both; a head that is exported again keeps it.
    export("--run", tmp_path / name / "run", "--out", tmp_path / "mine", "--base-model", "me/mine")
    export("--draft", tmp_path / "mine", "--out", tmp_path / "again")
    assert card(tmp_path / "again")[0]["base_model"] == "me/mine"
    assert Inspection.of(tmp_path / "again", target).facts["trained for"] == "me/mine"


def test_a_run_is_exported_without_its_data(
    kind: str, target: Path, model: LlamaModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once it was moved or deleted, its names are left out."""
    save_run(kind, tmp_path / "run", target, model)
    shutil.rmtree(tmp_path / "prepared")
    export("--run", tmp_path / "run", "--out", tmp_path / "out")
    assert "prepared data is not there any more" in capsys.readouterr().out
    assert "| `data` |" not in card(tmp_path / "out")[1]
    assert Inspection.of(tmp_path / "out", None).facts["trained for"] == target.name


def test_a_card_leaves_out_what_nobody_knows(tmp_path: Path) -> None:
    save_random_head(tmp_path / "head")
    export("--draft", tmp_path / "head", "--out", tmp_path / "out")
    front, text = card(tmp_path / "out")
    assert not {"base_model", "license"} & front.keys()
    assert "## Training" not in text
    assert "## Figures" not in text
    # vLLM has no place for this head's fc.bias.
    assert "vllm" not in text
    assert "--model TARGET" in text


def test_refusals_are_one_line_with_a_remedy(
    target: Path, model: LlamaModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run("eagle3", tmp_path / "run", target, model)
    save_run("eagle", tmp_path / "moved", tmp_path / "gone", model)
    save_random_llama(tmp_path / "wide", hidden_size=48, num_hidden_layers=7)
    (tmp_path / "broken" / "state" / "step-00000001").mkdir(parents=True)
    (tmp_path / "broken" / "state" / "step-00000001" / "progress.json").write_text("no")
    save_run("eagle", tmp_path / "torn", target, model)
    (tmp_path / "torn" / "state" / "step-00000070" / "pytorch_model.bin").write_text("no")
    for name, save in (("eagle", save_random_head), ("eagle3", save_random_eagle3)):
        save(tmp_path / name)
        save(tmp_path / f"{name}-more")
        tensors = load_file(tmp_path / name / "model.safetensors")
        more = {"lm_head.weight" if name == "eagle" else "embed_tokens.weight": torch.zeros(V, H)}
        save_file({**tensors, **more}, tmp_path / f"{name}-more" / "model.safetensors")
    edit_json(tmp_path / "eagle-more" / "config.json", architectures=["LlamaForCausalLMEagle"])
    edit_json(tmp_path / "eagle3" / "config.json", eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    (tmp_path / "no.json").write_text("{}")
    for words, told in [
        (["--run", tmp_path], "no state of a run; give the folder `run`"),
        (["--run", tmp_path / "broken"], "not the state of a run"),
        (["--run", tmp_path / "torn"], "not the weights of a run"),
        (["--run", tmp_path / "moved"], "the run's target is not here; give its folder by --model"),
        (["--run", tmp_path / "run", "--model", tmp_path / "wide"], "not of a head for"),
        (["--run", tmp_path / "run", "--evaluation", tmp_path / "no.json"], "not an evaluation"),
        (["--run", tmp_path / "run", "--notes", tmp_path / "no.md"], "give a Markdown file"),
        (["--draft", tmp_path / "null_block_table"], "no such folder"),
        (["--draft", target], "not a draft head of a known kind"),
        (["--draft", tmp_path / "eagle-more"], "it has an output matrix of its own"),
        (["--draft", tmp_path / "eagle3-more"], "it has an embedding of its own"),
        (["--draft", tmp_path / "eagle3"], "leaves open which layers it reads"),
    ]:
        with pytest.raises(SystemExit) as ended:
            export(*words, "--out", tmp_path / "out")
        printed = capsys.readouterr().err
        assert (ended.value.code, told in printed, printed.count("\n")) == (2, True, 1), printed
    assert not (tmp_path / "out").exists()
