"""Values of a wrong type in a config.json: the checkpoint is read all the same, or refused in one line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.draft_heads.formats.block_settings import block_rows
from specdec.draft_heads.formats.head_kinds import describe_folder
from specdec.draft_heads.llama.weight_files import read_tensors
from specdec.models.llama import read_llama_config
from tests.block_formats import BLOCK_FORMATS
from tests.fakes import TINY
from tests.head_formats import FORMATS
from tests.profiles import by_day

pytestmark = pytest.mark.slow

VALUES = (5, "5", None, ["5"], {"5": 5})
# What configs may have beside their own keys.
OPTIONAL = ("architectures", "layer_types", "sliding_window", "use_sliding_window", "rope_scaling", "dflash_config")
YARN = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64, "attention_factor": 1.0}
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": SCHEME,
    "sparsity_config": {"format": "dense"},
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
}
FLOATS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "block_structure": [128, 128]}}},
}
TARGETS: list[dict[str, Any]] = [
    {"rope_scaling": YARN},
    {"quantization_config": PACKED},
    {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    {"model_type": "baichuan", "model_max_length": 64},
]


def spoilt(config: dict[str, Any], more: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Yield a config.json with each of its values, at any depth, replaced by each of the others."""
    for key in (*config, *(key for key in more if key not in config)):
        yield from ({**config, key: value} for value in VALUES)
        if isinstance(config.get(key), dict):
            yield from ({**config, key: inner} for inner in spoilt(config[key]))


def check(read: Callable[[Path], object], folder: Path) -> None:
    message = ""
    try:
        read(folder)
    except ValueError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize("settings", TARGETS, ids=lambda settings: next(iter(settings)))
def test_of_a_target(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"model_type": "llama", **TINY, **settings}
    for config in (whole, *spoilt(whole, OPTIONAL)):
        monkeypatch.setattr("specdec.models.llama.read_settings", lambda _, config=config: config)
        check(read_llama_config, Path())


HEADS = {**FORMATS, **BLOCK_FORMATS}
FIRST = ["speculators_eagle3", "specforge_eagle3", "deepspec_dspark"]


@pytest.mark.long
@pytest.mark.parametrize("name", by_day(FIRST + [name for name in HEADS if name not in FIRST], 3))
def test_of_a_head(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = HEADS[name]()
    tensors = read_tensors(fixture.write(tmp_path))
    monkeypatch.setattr("specdec.draft_heads.formats.head_kinds.read_tensors", lambda _: tensors)
    whole = {**fixture.config, "quantization_config": FLOATS}
    for config in (whole, *spoilt(whole, OPTIONAL)):
        for place in ("head_kinds", "block_settings"):
            monkeypatch.setattr(f"specdec.draft_heads.formats.{place}.read_config", lambda _, config=config: config)
        check(describe_folder, tmp_path)
        check(block_rows, tmp_path)
