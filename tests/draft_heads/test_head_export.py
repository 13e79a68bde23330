"""EAGLE-3 heads as they are saved: the official layout, and back to the same bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.draft_heads.formats.eagle3 import VARIANTS
from specdec.draft_heads.formats.head_kind import LoadedHead
from specdec.draft_heads.formats.head_kinds import KINDS, load_head
from specdec.draft_heads.heads.draft_head import TargetParts
from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.rope import RopeConfig
from specdec.kernels.reference.projection import Projection
from tests.checkpoints import FEW, TARGET_EMBED, TARGET_HIDDEN, TARGET_LAYERS, TARGET_OUT, VOCAB, llama_config
from tests.draft_heads.loading import load as load_double
from tests.head_formats import FORMATS
from tests.kernel_sets import TORCH

EAGLE3 = KINDS["eagle3"]
IDS = "eagle_aux_hidden_state_layer_ids"
# As the official code names and shapes them, for a hidden size of 24, 4 and 2 heads of 6, an MLP of 28 and 12 tokens.
OFFICIAL = {
    "fc.weight": [24, 72],
    "midlayer.self_attn.q_proj.weight": [24, 48],
    "midlayer.self_attn.k_proj.weight": [12, 48],
    "midlayer.self_attn.v_proj.weight": [12, 48],
    "midlayer.self_attn.o_proj.weight": [24, 24],
    "midlayer.mlp.gate_proj.weight": [28, 24],
    "midlayer.mlp.up_proj.weight": [28, 24],
    "midlayer.mlp.down_proj.weight": [24, 28],
    "midlayer.hidden_norm.weight": [24],
    "midlayer.input_layernorm.weight": [24],
    "midlayer.post_attention_layernorm.weight": [24],
    "norm.weight": [24],
    "lm_head.weight": [12, 24],
    "d2t": [12],
    "t2d": [53],
}
NORMS = {**{f"fc_norm.{tap}.weight": [24] for tap in range(3)}, "input_norm.weight": [72]}
SECOND = {
    "layers.1.self_attn.q_proj.weight": [24, 24],
    "layers.1.self_attn.k_proj.weight": [12, 24],
    "layers.1.self_attn.v_proj.weight": [12, 24],
    "layers.1.self_attn.o_proj.weight": [24, 24],
    "layers.1.mlp.gate_proj.weight": [28, 24],
    "layers.1.mlp.up_proj.weight": [28, 24],
    "layers.1.mlp.down_proj.weight": [24, 28],
    "layers.1.input_layernorm.weight": [24],
    "layers.1.post_attention_layernorm.weight": [24],
}


def new_head(tokens: list[int] = FEW, taps: tuple[int, ...] = (2, 4, 5), layers: int = 1, **more: Any) -> Eagle3Head:
    torch.manual_seed(3)
    made = Eagle3Head(Eagle3Config(layer_config(layers), taps, TARGET_HIDDEN, len(tokens), **more))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    made.embed_tokens.weight.data.copy_(TARGET_EMBED)
    made.draft_tokens.copy_(torch.tensor(tokens))
    return made


def layer_config(layers: int) -> LlamaConfig:
    return LlamaConfig.from_json({**llama_config(FORMATS["official_eagle3"]().head), "num_hidden_layers": layers})


def load(folder: Path) -> LoadedHead:
    parts = TargetParts(TARGET_EMBED.bfloat16().float(), Projection(TARGET_OUT.float()), layer_config(TARGET_LAYERS))
    return load_head(folder, parts, TORCH)


def check_round_trip(head: Eagle3Head, folder: Path) -> LoadedHead:
    loaded = load(folder)
    back = loaded.draft.head.module
    assert isinstance(back, Eagle3Head)
    assert back.config == head.config
    assert loaded.other is None
    assert torch.equal(back.draft_tokens, head.draft_tokens)
    expected = dict(head.named_parameters())
    for name, parameter in back.named_parameters():
        assert torch.equal(parameter, expected[name].bfloat16().float()), name
    return loaded


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        ({}, OFFICIAL),
        ({"taps": (0, 3, 8)}, OFFICIAL),
        (
            {"fc_norm": True, "norm_output": True, "norm_before_fc": True, "norm_before_residual": True},
            OFFICIAL | NORMS,
        ),
        ({"layers": 2}, OFFICIAL | SECOND),
        ({"fc_bias": True}, OFFICIAL | {"fc.bias": [24]}),
    ],
    ids=["plain", "other layers", "3.1", "two layers", "bias"],
)
def test_saved_head_has_official_names_and_loads_as_it_was(
    tmp_path: Path, settings: dict[str, Any], shapes: dict[str, list[int]]
) -> None:
    head = new_head(**settings)
    EAGLE3.save(head, tmp_path, {"recipe": {"steps": 5}})
    assert {name: list(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()} == shapes
    config = json.loads((tmp_path / "config.json").read_text())
    # vLLM reads the first, inputs of layers; SGLang the second, outputs of them.
    assert config[IDS] == list(head.taps)
    assert config["eagle_config"] == {IDS: [tap - 1 for tap in head.taps], "use_aux_hidden_state": True}
    assert (config["architectures"], config["draft_vocab_size"]) == (["LlamaForCausalLM"], 12)
    assert config["recipe"] == {"steps": 5}
    assert {key for key in VARIANTS if config.get(key)} == settings.keys() & set(VARIANTS)
    check_round_trip(head, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_are_saved_as_asked(tmp_path: Path, dtype: torch.dtype) -> None:
    head = new_head()
    EAGLE3.save(head, tmp_path, {}, dtype)
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {dtype, torch.int64, torch.bool}
    assert torch.equal(saved["fc.weight"], head.fc.weight.to(dtype))


def test_a_whole_vocabulary_has_no_map(tmp_path: Path) -> None:
    head = new_head(list(range(VOCAB)))
    EAGLE3.save(head, tmp_path, {})
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names == OFFICIAL.keys() - {"d2t", "t2d"}
    assert check_round_trip(head, tmp_path).description.tokens is None


def test_an_embedding_of_its_own_size_is_saved(tmp_path: Path) -> None:
    loaded = load_double(FORMATS["official_eagle3_own_size"]().write(tmp_path / "a"))
    head = loaded.draft.head.module
    assert isinstance(head, Eagle3Head)
    EAGLE3.save(head, tmp_path / "b", {})
    assert json.loads((tmp_path / "b" / "config.json").read_text())["target_hidden_size"] == TARGET_HIDDEN
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == OFFICIAL.keys() | {"embed_tokens.weight"}
    check_round_trip(head, tmp_path / "b")


@pytest.mark.parametrize("name", ["official_eagle3", "official_eagle3_whole"])
def test_an_official_file_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    fixture = FORMATS[name]()
    # What bfloat16 can hold.
    fixture.tensors = {key: t.bfloat16() if t.is_floating_point() else t for key, t in fixture.tensors.items()}
    fixture.tensors.pop("embed_tokens.weight", None)
    head = load_double(fixture.write(tmp_path / "a")).draft.head.module
    assert isinstance(head, Eagle3Head)
    EAGLE3.save(head, tmp_path / "b", {})
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == fixture.tensors.keys()
    for key, tensor in fixture.tensors.items():
        assert torch.equal(saved[key], tensor), key


def test_saving_does_not_change_the_head(tmp_path: Path) -> None:
    head = new_head(fc_norm=True)
    before = {name: parameter.clone() for name, parameter in head.named_parameters()}
    EAGLE3.save(head, tmp_path, {})
    assert all(torch.equal(parameter, before[name]) for name, parameter in head.named_parameters())


def test_rope_type_that_the_format_lacks_is_not_saved(tmp_path: Path) -> None:
    head = new_head()
    rope = RopeConfig(rope_type="yarn", factor=2.0)
    head.config = replace(head.config, llama=replace(head.config.llama, rope=rope))
    with pytest.raises(ValueError, match="'yarn'"):
        EAGLE3.save(head, tmp_path / "head", {})
    assert not (tmp_path / "head").exists()
