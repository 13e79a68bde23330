"""Heads in 8-bit floats are the heads that their numbers and scales say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.draft_heads.formats.head_kinds import describe_folder
from specdec.draft_heads.heads.draft_head import FeatureHead
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from tests.block_formats import BLOCK_FORMATS
from tests.checkpoints import Fixture
from tests.draft_heads.loading import load
from tests.head_formats import FORMATS
from tests.quantized_checkpoints import FORMATS as STORED
from tests.quantized_checkpoints import Format

HEADS = {**FORMATS, **BLOCK_FORMATS}
NAMES = ("official_eagle", "official_eagle3", "speculators_eagle3", "zlab_dflash", "deepspec_dspark")
# What Model-Optimizer writes about `export_speculative_decoding` and `hf_ptq`, as SGLang reads it.
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "producer": {"name": "modelopt", "version": "0.45.0"},
    "config_groups": {
        "group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}, "targets": ["Linear"]}
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
FP8: dict[str, Format] = {
    **{name: STORED[name] for name in ("fp8", "fp8-blocks", "fp8-odd-blocks", "fp8-channels")},
    "modelopt": STORED["fp8"]._replace(config=MODELOPT),
    # Their settings lie in hf_quant_config.json alone.
    "modelopt, older": STORED["fp8"]._replace(config={}),
}


def quantized(fixture: Fixture, stored: Format) -> dict[str, Tensor]:
    """Store the matrices of a head's layers in a format; return the weights that it says."""
    said = dict[str, Tensor]()
    for name, tensor in list(fixture.tensors.items()):
        said[name] = tensor
        if tensor.ndim == 2 and "layer" in name and tensor.is_floating_point():
            del fixture.tensors[name]
            own, said[name] = stored.store(tensor)
            fixture.tensors |= {f"{name.removesuffix('weight')}{part}": each for part, each in own.items()}
    if stored.config:
        fixture.config["quantization_config"] = stored.config
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in fixture.tensors.values())
    return said


def weights(folder: Path) -> dict[str, Tensor]:
    module: Any = load(folder).draft.head.module
    assert isinstance(module, FeatureHead)
    return module.split_parameters()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stored", FP8)
def test_a_head_in_8_bit_floats_is_what_its_scales_say(name: str, stored: str, tmp_path: Path) -> None:
    small = HEADS[name]()
    said = quantized(small, FP8[stored])
    plain = HEADS[name]()
    differ = [key for key in said if not torch.equal(said[key], plain.tensors[key])]
    assert differ
    plain.tensors = said
    found, wanted = weights(small.write(tmp_path / "small")), weights(plain.write(tmp_path / "plain"))
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key


FAULTS: list[tuple[dict[str, Tensor | None], dict[str, Any], str]] = [
    ({"weight_scale": None}, MODELOPT, "midlayer.mlp.up_proj.weight is stored as float8_e4m3fn; weights must be"),
    ({"weight_scale": torch.ones(5)}, MODELOPT, "midlayer.mlp.up_proj.weight: scales of shape [5] do not fit a"),
    ({}, {"quant_method": "fp8", "weight_block_size": "ab"}, "config.json: blocks of scales are 'ab'; they must be"),
    ({"weight_scale": torch.tensor(float("nan"))}, MODELOPT, "midlayer.mlp.up_proj.weight holds nan; weights must be"),
    ({}, {**MODELOPT, "quant_algo": "NVFP4"}, "a quantised EAGLE head (quantization_config in config.json) is not"),
    ({}, {"quant_method": "fp8", "fmt": "e5m2"}, "a quantised EAGLE head (quantization_config in config.json) is not"),
    ({}, STORED["packed-4"].config, "a quantised EAGLE head (quantization_config in config.json) is not supported"),
]


@pytest.mark.parametrize(("parts", "config", "message"), FAULTS, ids=[message[-30:] for *_, message in FAULTS])
def test_what_is_no_such_head_is_refused_by_name(
    parts: dict[str, Tensor | None], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    fixture = FORMATS["official_eagle3"]()
    quantized(fixture, FP8["modelopt"]._replace(config=config))
    for part, tensor in parts.items():
        name = f"midlayer.mlp.up_proj.{part}"
        fixture.tensors |= {} if tensor is None else {name: tensor}
        if tensor is None:
            del fixture.tensors[name]
    folder = fixture.write(tmp_path / "head")
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    assert str(refused.value).startswith(f"{folder}: {message}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("config", [STORED["packed-4"].config, {"quant_method": "bitsandbytes", "load_in_4bit": True}])
def test_a_plain_head_with_its_targets_quantization_config_is_plain(config: dict[str, Any], tmp_path: Path) -> None:
    fixture = FORMATS["specforge_eagle3"]()
    expected = weights(fixture.write(tmp_path / "plain"))
    fixture.config["quantization_config"] = config
    found = weights(fixture.write(tmp_path / "copied"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_head_of_eagle_4_is_refused_for_its_licence(tmp_path: Path) -> None:
    fixture = FORMATS["specforge_eagle3"]()
    fixture.config["architectures"] = ["LlamaForCausalLMEagle4"]
    folder = fixture.write(tmp_path / "head")
    for read in (load, describe_folder):
        with pytest.raises(CheckpointError, match=r"an EAGLE-4 head \('Eagle4' in .* is not supported: its licence"):
            read(folder)
