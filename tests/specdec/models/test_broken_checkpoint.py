"""Broken checkpoints of targets: each is refused in one line that names what is wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, place
from specdec.models.llama import load_llama
from tests.fakes import edit_json
from tests.kernel_sets import TORCH
from tests.specdec.chunked_pass import CPU
from tests.specdec.saved_llama import edit_tensors, save_llama


def tensor_edit(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def config_edit(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def reshape(name: str, *shape: int) -> Callable[[Path], None]:
    return tensor_edit(lambda tensors: tensors.update({name: torch.zeros(shape)}))


ATTENTION = "model.layers.1.self_attn"


def trade_rows(tensors: dict[str, Tensor]) -> None:
    """Keys short of rows by as many as values have too many: together they have the right size."""
    key, value = tensors[f"{ATTENTION}.k_proj.weight"], tensors[f"{ATTENTION}.v_proj.weight"]
    tensors[f"{ATTENTION}.k_proj.weight"] = key[:8].clone()
    tensors[f"{ATTENTION}.v_proj.weight"] = torch.cat([value, key[8:]])


def drop_shard(folder: Path) -> None:
    save_llama(folder, max_shard_size="40KB")
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def break_index(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text) and None


def outside(name: str) -> Callable[[Path], None]:
    """Move the weights to a folder beside the checkpoint's, and name them in its index."""

    def damage(folder: Path) -> None:
        other = folder.with_name("other")
        other.mkdir()
        (folder / "model.safetensors").rename(other / "model.safetensors")
        names = dict.fromkeys(load_file(other / "model.safetensors"), name.format(folder.parent))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    return damage


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "head_dim", "max_position_embeddings")
NO_SIZES = (-3, 0, 1.5, "32", [32], {}, True, math.nan, math.inf, 10**18, 10**30)

BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing tensor": (tensor_edit(lambda t: t.pop("model.norm.weight")), "norm.weight"),
    "missing layer": (config_edit(num_hidden_layers=3), "layers.2"),
    "missing lm_head": (tensor_edit(lambda t: t.pop("lm_head.weight")), "lm_head.weight"),
    "unexpected tensor": (tensor_edit(lambda t: t.update(extra=torch.zeros(1))), "extra"),
    "unexpected layer": (config_edit(num_hidden_layers=1), "layers.1"),
    "unexpected bias": (
        tensor_edit(lambda t: t.update({f"{ATTENTION}.o_proj.bias": torch.zeros(32)})),
        "o_proj.bias",
    ),
    "missing biases": (config_edit(attention_bias=True), "bias"),
    "wrong shape": (reshape("model.norm.weight", 31), "norm.weight"),
    "wrong vocab": (config_edit(vocab_size=96), "embed_tokens.weight"),
    "wrong rows of q": (reshape(f"{ATTENTION}.q_proj.weight", 24, 32), "layers.1"),
    "wrong columns of q": (reshape(f"{ATTENTION}.q_proj.weight", 32, 31), "q_proj"),
    "wrong columns of up": (reshape("model.layers.0.mlp.up_proj.weight", 48, 31), "up_proj"),
    "rows traded between k and v": (tensor_edit(trade_rows), "k_proj"),
    "q missing": (tensor_edit(lambda t: t.pop(f"{ATTENTION}.q_proj.weight")), "layers.1.self_attn.q_proj.weight"),
    "k missing": (tensor_edit(lambda t: t.pop(f"{ATTENTION}.k_proj.weight")), "layers.1.self_attn.k_proj.weight"),
    "v missing": (tensor_edit(lambda t: t.pop(f"{ATTENTION}.v_proj.weight")), "layers.1.self_attn.v_proj.weight"),
    "gate missing": (tensor_edit(lambda t: t.pop("model.layers.0.mlp.gate_proj.weight")), "gate_proj"),
    "tied to another matrix": (config_edit(tie_word_embeddings=True), "lm_head.weight"),
    "sliding window": (config_edit(sliding_window=64), "sliding_window"),
    "layer types": (config_edit(layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
    "unknown rope": (config_edit(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "longrope"),
    "unknown rope, old": (config_edit(rope_parameters=None, rope_scaling={"type": "su", "factor": 2.0}), "'su'"),
    "rope without factor": (config_edit(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "factor"),
    "rope of factor 0": (config_edit(rope_parameters={"rope_type": "linear", "factor": 0}), "factor"),
    "rope a list": (config_edit(rope_parameters=[1.0]), "rope_parameters = [1.0] must be an object"),
    "rope of a theta that is lost": (
        config_edit(
            rope_theta=None,
            rope_parameters={"rope_type": "default", "rope_theta": 5e4},
            rope_scaling={"rope_type": "yarn", "factor": 2.0},
        ),
        "rope_theta 50000.0 of rope_parameters does not hold beside rope_scaling; put it into rope_scaling too",
    ),
    **{
        f"rope of two thetas in {spelling}": (
            config_edit(rope_theta=1e6, **{spelling: {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}}),
            f"rope_theta is 1000000.0 at the top and 50000.0 in {spelling}; remove the wrong one",
        )
        for spelling in ("rope_parameters", "rope_scaling")
    },
    "rope of text for a flag": (
        config_edit(rope_parameters={"rope_type": "yarn", "factor": 2.0, "truncate": "false"}),
        "truncate = 'false' must be true or false",
    ),
    "rope for each layer type": (
        config_edit(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 5e4}}),
        "rope_parameters of its own for each layer type",
    ),
    "rope of theta 0": (config_edit(rope_theta=0, rope_parameters={"rope_type": "default"}), "'rope_theta' is 0"),
    "rope of no length": (
        config_edit(rope_parameters={"rope_type": "yarn", "factor": 2}, original_max_position_embeddings="64"),
        "'original_max_position_embeddings' is '64'",
    ),
    "text for a flag": (config_edit(attention_bias="false"), "attention_bias = 'false' must be true or false"),
    "8-bit weight": (
        tensor_edit(lambda t: t.update({f"{ATTENTION}.o_proj.weight": torch.ones(32, 32, dtype=torch.int8)})),
        f"{ATTENTION.removeprefix('model.')}.o_proj.weight is stored as int8",
    ),
    "8-bit part": (
        tensor_edit(lambda t: t.update({f"{ATTENTION}.q_proj.weight": torch.ones(32, 32, dtype=torch.int8)})),
        "q_proj.weight is stored as int8",
    ),
    "float8 weight": (
        tensor_edit(lambda t: t.update({"lm_head.weight": torch.ones(97, 32).to(torch.float8_e4m3fn)})),
        "lm_head.weight is stored as float8_e4m3fn",
    ),
    "partial rotary": (config_edit(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "gelu": (config_edit(hidden_act="gelu"), "gelu"),
    "quantised": (config_edit(quantization_config={"quant_method": "gptq"}), "quantization_config"),
    "gemma": (config_edit(model_type="gemma"), "serves llama, mistral, qwen2, qwen3, baichuan"),
    "no model_type": (config_edit(model_type=None), "model_type"),
    "no hidden size": (config_edit(hidden_size=None), "hidden_size"),
    "text for a number": (config_edit(hidden_size="32"), "hidden_size"),
    "text for an epsilon": (config_edit(rms_norm_eps="tiny"), "rms_norm_eps"),
    "kv heads do not divide": (config_edit(num_key_value_heads=3), "3 key-value heads"),
    "no such folder": (lambda folder: [*map(Path.unlink, folder.iterdir()), folder.rmdir()], "no such folder"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config no JSON": (lambda folder: (folder / "config.json").write_text("{,"), "not valid JSON"),
    "config no text": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{"), "not valid JSON"),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
    **{f"{key} {size!r}": (config_edit(**{key: size}), key) for key in SIZES for size in NO_SIZES},
    "vast vocabulary": (config_edit(vocab_size=10**9), "vocab_size = 1000000000 must be at most"),
    "large vocabulary": (
        config_edit(vocab_size=2**26),
        "embed_tokens.weight has shape [97, 32], config.json says [671",
    ),
    "vast layers": (config_edit(num_hidden_layers=10**6), "num_hidden_layers = 1000000 must be at most"),
    "many layers": (config_edit(num_hidden_layers=9999), "num_hidden_layers = 9999, but layers.2 has no tensors"),
    "vast heads": (config_edit(head_dim=2**20, num_attention_heads=2**20, num_key_value_heads=1), "are too many"),
    "epsilon not a number": (config_edit(rms_norm_eps=math.nan), "rms_norm_eps = nan"),
    "infinite epsilon": (config_edit(rms_norm_eps=math.inf), "rms_norm_eps = inf"),
    "layer types no list": (config_edit(layer_types=5), "layer_types = 5 must be a list"),
    "layer types of lists": (config_edit(layer_types=[["full_attention"]]), "layer_types [['full_attention']]"),
    "model_type a list": (config_edit(model_type=["llama"]), "model_type ['llama']"),
    "rope of theta NaN": (config_edit(rope_theta=math.nan, rope_parameters=None), "'rope_theta' is nan"),
    "rope of vast theta": (config_edit(rope_theta=10**400, rope_parameters=None), "'rope_theta' is 1000"),
    "yarn of theta 1": (
        config_edit(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}),
        "'rope_theta' is 1; it must be a number above 1",
    ),
    "config deep": (lambda folder: (folder / "config.json").write_text('{"a": ' + "[" * 10**5), "not valid JSON"),
    "config a number": (lambda folder: (folder / "config.json").write_text("5"), "not a JSON object"),
    "config in UTF-16": (
        lambda folder: (folder / "config.json").write_bytes((folder / "config.json").read_text().encode("utf-16")),
        "not valid JSON",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "corrupt weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "model.safetensors"),
    "cut weights": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
        "model.safetensors",
    ),
    "missing shard": (drop_shard, "model-00002-of-"),
    "index no JSON": (break_index("{,"), "model.safetensors.index.json"),
    "index without map": (break_index("{}"), "model.safetensors.index.json"),
    "index of a number": (break_index('{"weight_map": {"a": 5}}'), "'weight_map' names 5"),
    "index of a list": (break_index('{"weight_map": {"a": ["model.safetensors"]}}'), "'weight_map' names ['model.saf"),
    "index, deep": (break_index('{"weight_map": ' + "[" * 10**5), "model.safetensors.index.json: not valid JSON"),
    "index that climbs out": (outside("../other/model.safetensors"), "'weight_map' names '../other/model.safetensors'"),
    "index that goes round": (outside("a/../../other/model.safetensors"), "it must be a file in the index's folder"),
    "index of an absolute path": (outside("{}/other/model.safetensors"), "it must be a file in the index's folder"),
    "index of a long name": (outside("a" * 300), "it must be a file in the index's folder"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_checkpoint_is_refused_in_one_line_that_names_it(tmp_path: Path, what: str) -> None:
    damage, named = BROKEN[what]
    folder = tmp_path / "target"
    save_llama(folder)
    load_llama(folder, torch.float32, CPU, TORCH)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load_llama(folder, torch.float32, CPU, TORCH)
    message = str(caught.value)
    assert named in message
    assert str(folder) in message
    assert "\n" not in message


def test_nothing_is_built_of_sizes_that_no_tensor_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path)
    made: list[torch.device] = []

    def note(module: nn.Module, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        made.append(device)
        place(module, tensors, dtype, device)

    monkeypatch.setattr("specdec.models.llama.place", note)
    load_llama(tmp_path, torch.float32, CPU, TORCH)
    assert made.pop() == CPU
    for key, size in (("vocab_size", 2**26), ("intermediate_size", 2**26), ("head_dim", 2**20)):
        edit_json(tmp_path / "config.json", **{key: size})
        with pytest.raises(CheckpointError, match=r"config\.json says"):
            load_llama(tmp_path, torch.float32, CPU, TORCH)
        assert not made
