"""What old checkpoints hold besides weights, and files beside the weights: neither stops a load, nor changes it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.weight_files import INDEX, has_weights
from specdec.models.llama import load_llama
from specdec.models.llama_draft import holds_llama
from tests.block_formats import BLOCK_FORMATS
from tests.checkpoints import Fixture
from tests.draft_heads.loading import load
from tests.head_formats import FORMATS
from tests.kernel_sets import TORCH
from tests.specdec.chunked_pass import CPU
from tests.specdec.saved_llama import edit_tensors, save_llama

LAYER = "model.layers.1.self_attn"
MASK = torch.ones(8, 8, dtype=torch.uint8).tril()[None, None]
BUFFERS: dict[str, Tensor] = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    "model.rotary_emb.inv_freq": torch.ones(4),
    "model.rotary_emb.original_inv_freq": torch.ones(4),
    "rotary_emb.inv_freq": torch.ones(4),
    f"{LAYER}.rotary_emb.cos_cached": torch.ones(1, 1, 8, 8),
    f"{LAYER}.rotary_emb.sin_cached": torch.ones(1, 1, 8, 8, dtype=torch.float16),
    f"{LAYER}.masked_bias": torch.tensor(-1e4),
    "model.layers.1.attn.masked_bias": torch.tensor(-1e4),
    "model.layers.1.attn.bias": MASK,
    f"{LAYER}.bias": MASK.bool(),
    "model.layers.0.attention.bias": MASK.float(),
    "model.embeddings.position_ids": torch.arange(8)[None],
    "model.position_ids": torch.arange(8)[None],
}
# Each is a part of some model, if not of this one.
UNKNOWN: dict[str, Tensor] = {
    f"{LAYER}.bias": torch.ones(32),
    "model.layers.1.attn.bias": torch.ones(1, 1, 8, 9),
    "model.rotary_emb.weight": torch.ones(4),
    "model.position_embeddings.weight": torch.ones(8, 32),
    "model.embed_positions.weight": torch.ones(8, 32),
    f"{LAYER}.sinks": torch.ones(4),
    "model.layers.2.self_attn.q_proj.weight": torch.ones(32, 32),
    "inv_freq_scale": torch.ones(4),
}


def loaded(folder: Path) -> dict[str, Tensor]:
    return dict(load_llama(folder, torch.float64, CPU, TORCH).weights.named_parameters())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    save_llama(tmp_path / "target")
    return tmp_path / "target"


def test_buffers_of_old_versions_are_left_out(target: Path) -> None:
    expected = loaded(target)
    for name, tensor in BUFFERS.items():
        edit_tensors(target, lambda tensors, own=(name, tensor): tensors.update([own]))  # type: ignore[misc]
        assert_same(loaded(target), expected)
    assert len(load_file(target / "model.safetensors")) >= len(BUFFERS)
    assert holds_llama(target)


@pytest.mark.parametrize("name", UNKNOWN)
def test_tensors_of_other_models_are_still_refused(target: Path, name: str) -> None:
    edit_tensors(target, lambda tensors: tensors.update({name: UNKNOWN[name]}))
    with pytest.raises(CheckpointError, match=f"unexpected tensors: {name.removeprefix('model.')}"):
        loaded(target)


@pytest.mark.parametrize("name", [*FORMATS, *BLOCK_FORMATS])
def test_heads_hold_them_too(name: str, tmp_path: Path) -> None:
    fixture: Fixture = (FORMATS | BLOCK_FORMATS)[name]()
    expected = load(fixture.write(tmp_path / "head")).draft.head
    for buffer in ("layers.0.self_attn.rotary_emb.inv_freq", "midlayer.self_attn.rotary_emb.cos_cached"):
        fixture.tensors[buffer] = torch.ones(3)
    fixture.tensors |= {"embeddings.position_ids": torch.arange(8), "layers.0.attn.bias": MASK}
    found = load(fixture.write(tmp_path / "old")).draft.head
    assert_same(*(dict(head.module.named_parameters()) for head in (found, expected)))  # type: ignore[attr-defined]


def put_safetensors(name: str) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        save_file({"tok_embeddings.weight": torch.ones(2, 2)}, folder / name)

    return put


def put_pickle(name: str) -> Callable[[Path], None]:
    return lambda folder: torch.save({"tok_embeddings.weight": torch.ones(2, 2)}, folder / name)


def put_stale_index(folder: Path) -> None:
    weight_map = dict.fromkeys(["model.norm.weight"], "model-00001-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


FILES: dict[str, Callable[[Path], None]] = {
    **{
        name: put_safetensors(name)
        for name in (
            "consolidated.safetensors",
            "consolidated-00001-of-00002.safetensors",
            "adapter_model.safetensors",
            "original/consolidated.00.safetensors",
            "original/model.safetensors",
            "mmproj.safetensors",
            "model-00009-of-00009.safetensors",
        )
    },
    **{
        name: put_pickle(name)
        for name in ("pytorch_model.bin", "training_args.bin", "optimizer.bin", "adapter_model.bin", "consolidated.pth")
    },
    "pickle that is none": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"no pickle") and None,
    "another index": lambda folder: (folder / "pytorch_model.bin.index.json").write_text("{}") and None,
    "index of shards that are gone": put_stale_index,
}


@pytest.mark.parametrize("what", FILES)
def test_files_beside_the_weights_are_ignored(target: Path, what: str) -> None:
    expected = loaded(target)
    FILES[what](target)
    assert has_weights(target)
    assert_same(loaded(target), expected)
    # The same for a head.
    fixture = FORMATS["official_eagle3"]()
    fixture.pickled = False
    FILES[what](fixture.write(target.parent / "head"))
    assert load(target.parent / "head").draft.head is not None


@pytest.mark.parametrize("what", [name for name in FILES if "index" not in name])
@pytest.mark.parametrize("has_index", [True, False])
def test_files_beside_shards_are_ignored(tmp_path: Path, what: str, has_index: bool) -> None:
    """Without the index, shards are known by their names."""
    save_llama(tmp_path, max_shard_size="60KB")
    expected = loaded(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    if not has_index:
        if what.startswith("model-"):
            pytest.skip("nothing tells it from a shard")
        (tmp_path / INDEX).unlink()
    FILES[what](tmp_path)
    assert_same(loaded(tmp_path), expected)


@pytest.mark.parametrize("last", [True, False])
def test_a_tensor_in_two_shards_is_that_of_the_index(tmp_path: Path, last: bool) -> None:
    save_llama(tmp_path, max_shard_size="60KB")
    expected = loaded(tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    own, other = (shards[-1], shards[0]) if last else (shards[0], shards[-1])
    name, weight = next(iter(load_file(own).items()))
    save_file({**load_file(other), name: weight + 1}, other)
    assert_same(loaded(tmp_path), expected)


def test_pickles_are_those_of_the_usual_name(target: Path) -> None:
    expected = loaded(target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    torch.save(tensors, target / "pytorch_model.bin")
    put_pickle("pytorch_model_fsdp.bin")(target)
    put_pickle("training_args.bin")(target)
    put_safetensors("adapter_model.safetensors")(target)
    assert_same(loaded(target), expected)


def test_weights_of_another_name_are_found(target: Path) -> None:
    expected = loaded(target)
    shutil.move(target / "model.safetensors", target / "weights.safetensors")
    put_safetensors("consolidated.safetensors")(target)
    assert_same(loaded(target), expected)


def test_foreign_files_alone_are_no_weights(target: Path) -> None:
    (target / "model.safetensors").unlink()
    put_safetensors("consolidated.safetensors")(target)
    assert not has_weights(target)
    with pytest.raises(CheckpointError, match=r"no weights: .*, and consolidated.safetensors is not in Hugging Face's"):
        loaded(target)
