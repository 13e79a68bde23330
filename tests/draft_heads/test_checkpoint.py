"""Heads in the official layout: what is written, what is read back, what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.draft_heads.formats.head_kinds import KINDS, load_head
from specdec.draft_heads.heads.draft_head import TargetParts
from specdec.draft_heads.heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, read_config
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.rope import RopeConfig
from specdec.kernels.reference.projection import Projection
from tests.fakes import TINY, edit_json, save_random_head
from tests.kernel_sets import TORCH

VOCAB, HIDDEN = TINY["vocab_size"], TINY["hidden_size"]
EMBEDDING = torch.arange(VOCAB * HIDDEN, dtype=torch.float32).view(VOCAB, HIDDEN) / 1000
# hidden 32, 4 heads and 2 key-value heads of 8, intermediate 48.
OFFICIAL = {
    "embed_tokens.weight": (97, 32),
    "fc.weight": (32, 64),
    "layers.0.self_attn.q_proj.weight": (32, 32),
    "layers.0.self_attn.k_proj.weight": (16, 32),
    "layers.0.self_attn.v_proj.weight": (16, 32),
    "layers.0.self_attn.o_proj.weight": (32, 32),
    "layers.0.mlp.gate_proj.weight": (48, 32),
    "layers.0.mlp.up_proj.weight": (48, 32),
    "layers.0.mlp.down_proj.weight": (32, 48),
    "layers.0.post_attention_layernorm.weight": (32,),
}
BIASES = {f"layers.0.self_attn.{name}_proj.bias": (size,) for name, size in (("q", 32), ("k", 16), ("v", 16))}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> EagleHead:
    parts = TargetParts(EMBEDDING.to(dtype), Projection(EMBEDDING.to(dtype)), LlamaConfig.from_json(TINY))
    head = load_head(folder, parts, TORCH).draft.head.module
    assert isinstance(head, EagleHead)
    return head


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def new_head(fc_bias: bool, qkv_bias: bool) -> EagleHead:
    torch.manual_seed(3)
    llama = LlamaConfig.from_json({**TINY, "num_hidden_layers": 1, "rope_theta": 777.0, "rms_norm_eps": 1e-3})
    head = EagleHead(EagleConfig(replace(llama, attention_bias=qkv_bias), fc_bias))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


@pytest.mark.parametrize("fc_bias", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_saved_head_has_official_names_and_loads_as_it_was(tmp_path: Path, fc_bias: bool, qkv_bias: bool) -> None:
    head = new_head(fc_bias, qkv_bias)
    KINDS["eagle"].save(head, tmp_path, {"recipe": {"steps": 5}})
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert shapes == {**OFFICIAL, **({"fc.bias": (32,)} if fc_bias else {}), **(BIASES if qkv_bias else {})}
    config = read_config(tmp_path)
    assert (config["bias"], config["qkv_bias"], config["recipe"]) == (fc_bias, qkv_bias, {"steps": 5})
    loaded = load(tmp_path)
    assert loaded.config == head.config
    expected = dict(head.named_parameters())
    actual = dict(loaded.named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        assert torch.equal(parameter, expected[name].bfloat16().float()), name
        assert not parameter.requires_grad


def test_query_key_and_value_rows_come_in_this_order(tmp_path: Path) -> None:
    KINDS["eagle"].save(new_head(True, True), tmp_path, {})
    tensors = load_file(tmp_path / "model.safetensors")
    layer = load(tmp_path).layers[0]
    for kind in ("weight", "bias"):
        qkv = torch.cat([tensors[f"layers.0.self_attn.{name}_proj.{kind}"] for name in "qkv"])
        assert torch.equal(getattr(layer.qkv_proj, kind), qkv.float())
    gate_up = torch.cat([tensors[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(layer.mlp.gate_up_proj.weight, gate_up.float())


def test_saving_does_not_change_the_head(tmp_path: Path) -> None:
    head = new_head(True, True)
    before = {name: parameter.clone() for name, parameter in head.named_parameters()}
    KINDS["eagle"].save(head, tmp_path, {})
    assert all(torch.equal(parameter, before[name]) for name, parameter in head.named_parameters())


def test_head_of_two_layers_round_trips(tmp_path: Path) -> None:
    head = save_random_head(tmp_path, num_hidden_layers=2)
    names = load_file(tmp_path / "model.safetensors")
    assert "layers.0.input_layernorm.weight" not in names
    assert "layers.1.input_layernorm.weight" in names
    assert load(tmp_path).config == head.config


def test_pytorch_model_bin_loads_like_safetensors(tmp_path: Path) -> None:
    save_random_head(tmp_path)
    expected = load(tmp_path).state_dict()
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    actual = load(tmp_path).state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_targets_embedding_is_used_where_the_file_has_none(tmp_path: Path) -> None:
    save_random_head(tmp_path)
    own = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"].float()
    assert torch.equal(load(tmp_path).embed_tokens.weight, own)
    edit_tensors(tmp_path, lambda t: t.pop("embed_tokens.weight"))
    assert torch.equal(load(tmp_path).embed_tokens.weight, EMBEDDING)


@pytest.mark.parametrize("has_bias", [True, False])
def test_config_silent_about_bias_leaves_it_to_the_tensors(tmp_path: Path, has_bias: bool) -> None:
    save_random_head(tmp_path, fc_bias=has_bias)
    edit_json(tmp_path / "config.json", bias=None, qkv_bias=None)
    assert (load(tmp_path).fc.bias is not None) == has_bias


def test_rope_is_the_heads_own(tmp_path: Path) -> None:
    save_random_head(tmp_path, rope_theta=123.0)
    assert load(tmp_path).config.llama.rope == RopeConfig(theta=123.0, original_max_position=256)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_head_loads_in_the_dtype_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    save_random_head(tmp_path)
    assert {parameter.dtype for parameter in load(tmp_path, dtype).parameters()} == {dtype}


def test_rope_type_that_the_format_lacks_is_not_saved(tmp_path: Path) -> None:
    head = new_head(True, False)
    rope = RopeConfig(rope_type="linear", factor=2.0)
    head.llama = replace(head.llama, rope=rope)
    head.config = replace(head.config, llama=head.llama)
    with pytest.raises(ValueError, match="'linear'"):
        KINDS["eagle"].save(head, tmp_path / "head", {})
    assert not (tmp_path / "head").exists()


def config_edit(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def tensor_edit(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


BROKEN: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "another hidden size": (config_edit(hidden_size=64), ("hidden_size", "64", "32")),
    "another vocab size": (config_edit(vocab_size=128), ("vocab_size", "128", "97")),
    "another embedding": (
        tensor_edit(lambda t: t.update({"embed_tokens.weight": torch.zeros(96, 32)})),
        ("embed_tokens.weight", "96", "97"),
    ),
    "bias promised": (tensor_edit(lambda t: t.pop("fc.bias")), ("fc.bias",)),
    "qkv bias promised": (config_edit(qkv_bias=True), ("bias",)),
    "one of three biases": (
        tensor_edit(lambda t: t.update({"layers.0.self_attn.k_proj.bias": torch.zeros(16)})),
        ("layers.0.self_attn.q_proj.bias",),
    ),
    "no fc": (tensor_edit(lambda t: t.pop("fc.weight")), ("fc.weight", "not a draft head")),
    "fc of three features": (
        tensor_edit(lambda t: t.update({"fc.weight": torch.zeros(32, 96)})),
        ("fc.weight", "96", "64"),
    ),
    "missing tensor": (
        tensor_edit(lambda t: t.pop("layers.0.post_attention_layernorm.weight")),
        ("layers.0.post_attention_layernorm.weight",),
    ),
    "missing part": (
        tensor_edit(lambda t: t.pop("layers.0.self_attn.v_proj.weight")),
        ("layers.0.self_attn.v_proj.weight",),
    ),
    "missing layer": (config_edit(num_hidden_layers=2), ("layers.1",)),
    "unexpected norm": (
        tensor_edit(lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)})),
        ("layers.0.input_layernorm.weight",),
    ),
    "unexpected lm_head": (
        tensor_edit(lambda t: t.update({"lm_head.weight": torch.zeros(97, 32)})),
        ("lm_head.weight",),
    ),
    "unknown rope": (config_edit(rope_scaling={"type": "su", "factor": 2.0}), ("'su'",)),
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ("no weights",)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_head_is_refused_in_one_line_that_names_it(tmp_path: Path, what: str) -> None:
    damage, named = BROKEN[what]
    save_random_head(tmp_path)
    load(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert all(name in message for name in named), message
    assert str(tmp_path) in message
    assert "\n" not in message
