"""Adapters in PEFT's format: scales, patterns, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.models.adapter_layout import adapted_products, target_layout
from specdec.models.llama import read_llama_config
from specdec.models.lora_adapter import read_adapter
from tests.fakes import edit_json
from tests.lora_adapters import merged, save_adapter
from tests.specdec.world import World

FILE = "adapter_model.safetensors"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "lora_alpha": 5},
        {"alpha_pattern": {"q_proj": 1, r"layers\.1\.mlp\..*": 40}},
        {"ranks": {"q_proj": 2, "down_proj": 9}, "use_rslora": True, "alpha_pattern": {"q_proj": 3}},
        {"modules": ("v_proj",)},
    ],
)
def test_it_adds_what_merging_adds(world: World, tmp_path: Path, settings: dict[str, Any]) -> None:
    config = read_llama_config(world.folder / "target")
    save_adapter(tmp_path, world.target, **settings)
    adapter = read_adapter(tmp_path, target_layout(config), 16, torch.float64)
    expected, before = (model.state_dict() for model in (merged(world.target, tmp_path), world.target))
    for layer, own in enumerate(adapter):
        for name, product in adapted_products(config).items():
            for part, (down, up) in zip(product.parts, own[name], strict=True):
                key = f"model.layers.{layer}.{part.module}.weight"
                torch.testing.assert_close(before[key] + up @ down, expected[key], rtol=0, atol=1e-12)
    assert any(not before[key].equal(expected[key]) for key in before)


def test_names_without_prefix_are_read_too(world: World, tmp_path: Path) -> None:
    config = read_llama_config(world.folder / "target")
    first = save_adapter(tmp_path / "first", world.target)
    second = save_adapter(tmp_path / "second", world.target)
    bare = {name.removeprefix("base_model.model.model."): each for name, each in load_file(first / FILE).items()}
    save_file(bare, second / FILE)
    for one, other in zip(
        *(read_adapter(each, target_layout(config), 16, torch.float64) for each in (first, second)), strict=True
    ):
        assert all(
            a.equal(b)
            for name in one
            for x, y in zip(one[name], other[name], strict=True)
            for a, b in zip(x, y, strict=True)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora = True is not supported; it must be False"),
        ({"bias": "lora_only"}, "bias = 'lora_only' is not supported; it must be 'none'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported; it must be None"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported; it must be 'LORA'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4' changes the base weights"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights = 'lora_ga' changes the base weights"),
        ({"kasa_config": {"beta": 1}}, r"kasa_config = \{'beta': 1\} is not supported; it must be None"),
        ({"r": 0}, "r holds 0; it must be a number above 0"),
        ({"lora_alpha": "8"}, "lora_alpha holds '8'; it must be a number above 0"),
        ({"rank_pattern": {"(": 3}}, r"rank_pattern holds '\(', no regular expression"),
        ({"alpha_pattern": [1]}, r"alpha_pattern is \[1\]; it must be an object"),
        (
            {"r": 5},
            r"layers.0.self_attn.q_proj: lora_A has shape \[4, 32\] and lora_B \[32, 4\]; rank 5 and the target",
        ),
    ],
)
def test_settings_that_are_not_honoured_are_refused(
    world: World, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    save_adapter(tmp_path, world.target)
    edit_json(tmp_path / "adapter_config.json", **settings)
    refuse(world, tmp_path, f"adapter_config.json: {message}" if "layers" not in message else message)


def refuse(world: World, folder: Path, message: str, max_rank: int = 16) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapter(folder, target_layout(read_llama_config(world.folder / "target")), max_rank, torch.float64)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(folder))


def test_a_rank_above_the_limit_is_refused(world: World, tmp_path: Path) -> None:
    save_adapter(tmp_path, world.target, ranks={"o_proj": 17})
    refuse(world, tmp_path, "o_proj: rank 17 is more than max_lora_rank 16; raise max_lora_rank")


PREFIX = "base_model.model.model.layers.0."


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("base_model.model.lm_head.lora_A.weight", (4, 32), "tensors that are not supported: base_model.model.lm_head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 97), "not supported: .*lora_embedding_A"),
        (f"{PREFIX}self_attn.q_proj.lora_magnitude_vector", (32,), "not supported: .*lora_magnitude_vector"),
        (f"{PREFIX}self_attn.q_proj.lora_B.bias", (32,), "not supported: .*lora_B.bias"),
        ("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", (4, 32), "not supported: .*layers.7.*target's 2"),
        (f"{PREFIX}mlp.up_proj.lora_A.weight", (4, 33), r"up_proj: lora_A has shape \[4, 33\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    world: World, tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    save_adapter(tmp_path, world.target)
    save_file({**load_file(tmp_path / FILE), name: torch.zeros(shape)}, tmp_path / FILE)
    refuse(world, tmp_path, message)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(world: World, tmp_path: Path, value: float) -> None:
    save_adapter(tmp_path, world.target)
    tensors = load_file(tmp_path / FILE)
    name = f"{PREFIX}mlp.up_proj.lora_B.weight"
    tensors[name].view(-1)[3] = value
    save_file(tensors, tmp_path / FILE)
    refuse(world, tmp_path, f"{name} holds {value}; weights must be finite numbers of float64")


def test_damaged_folders_are_refused(world: World, tmp_path: Path) -> None:
    refuse(world, tmp_path / "missing", "no such folder")
    save_adapter(tmp_path / "half", world.target)
    tensors = load_file(tmp_path / "half" / FILE)
    del tensors[f"{PREFIX}mlp.up_proj.lora_B.weight"]
    save_file(tensors, tmp_path / "half" / FILE)
    refuse(world, tmp_path / "half", "layers.0.mlp.up_proj: missing tensor lora_B")
    save_file({}, tmp_path / "half" / FILE)
    refuse(world, tmp_path / "half", "no tensors")
    (tmp_path / "half" / FILE).write_bytes(b"no tensors")
    refuse(world, tmp_path / "half", f"{FILE}: cannot be read")
    (tmp_path / "half" / FILE).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    refuse(world, tmp_path / "half", f"{FILE}: a pointer of Git LFS in place of the weights; run: git lfs pull")
    refuse(world, tmp_path / "hall", f"no such folder; the nearest is {tmp_path / 'half'}")
    (tmp_path / "half" / FILE).unlink()
    refuse(world, tmp_path / "half", f"not a LoRA adapter in PEFT's format: it holds no {FILE}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "adapter_config.json").write_text(json.dumps([]))
    refuse(world, tmp_path / "empty", f"it holds no {FILE}")
