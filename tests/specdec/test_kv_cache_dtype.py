"""Engines whose keys and values are in 8 bits: memory, checkpoints' scales, ranks, connectors, and what is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec import LLM, SamplingParams
from specdec.cache.kv_cache import KVDtypes, entry_bytes
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_layer import LlamaLayer
from specdec.engine.engine_builder import EngineBuilder
from specdec.kernels import kv_entries
from specdec.models.llama import load_llama, read_llama_config
from tests.coded_cache import CODES
from tests.fakes import edit_json, save_random_llama
from tests.kernel_sets import TORCH
from tests.quantized_checkpoints import quantize_folder
from tests.specdec.kv_transfer.engines import GREEDY, PROMPT, SIZE, disk, run
from tests.specdec.kv_transfer.engines import engine as connected
from tests.specdec.parallel.ranked_engine import engine, texts
from tests.specdec.saved_llama import edit_tensors
from tests.specdec.world import World

WHOLE = len(PROMPT) // SIZE * SIZE
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
CPU = torch.device("cpu")
Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(("head_dim", "kv_heads", "least"), [(64, 2, 1.88), (128, 8, 1.96)])
@pytest.mark.parametrize("code", CODES)
def test_a_token_takes_little_more_than_half(
    world: World, head_dim: int, kv_heads: int, least: float, code: torch.dtype
) -> None:
    """Bytes of target alone, and of numbers where the head keeps them."""
    config = replace(read_llama_config(world.folder / "target"), head_dim=head_dim, num_kv_heads=kv_heads)
    plain = entry_bytes(config, None, torch.bfloat16)
    assert plain == 2 * 2 * kv_heads * head_dim * 2
    assert least < plain / entry_bytes(config, None, torch.bfloat16, KVDtypes(code, torch.bfloat16)) < 2


def test_almost_twice_the_requests_run_in_the_same_memory(tmp_path: Path) -> None:
    """Counted: requests of one step, each of which needs three blocks."""
    save_random_llama(tmp_path, head_dim=64)
    memory = 60 * SIZE * 2 * (4 * 64 * 2)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    most = {}
    for kv_cache_dtype in ("auto", "int8", "fp8"):
        llm = LLM(
            tmp_path,
            None,
            dtype="bfloat16",
            kernels="torch",
            kv_cache_memory=memory,
            kv_cache_dtype=kv_cache_dtype,
            block_size=SIZE,
            max_num_seqs=64,
            max_model_len=40,
            watermark=0,
        )
        groups = [llm.new_group([3 + i] * 18, params) for i in range(64)]
        for group in groups:
            llm.engine.add_request(group.requests[0])
        running = []
        while llm.engine.has_unfinished:
            llm.engine.step()
            running.append(llm.stats().running)
        most[kv_cache_dtype] = max(running)
    assert most["auto"] == 20
    assert most["int8"] == most["fp8"] == 37


def checkpoint(world: World, folder: Path, scales: Change | None, scheme: dict[str, object] | None) -> Path:
    """Write the world's target with scales and a scheme of its keys and values."""
    shutil.copytree(world.folder / "target", folder, dirs_exist_ok=True)
    if scales is not None:
        edit_tensors(folder, scales)
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    edit_json(folder / "config.json", quantization_config=quantization if scheme else None)
    return folder


def scales_by_layer(form: str, *shape: int) -> Change:
    """Add a scale to each layer, 0.01 for keys of the first, then 0.02, and so on, and a bit more for each head."""

    def add(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            for place, each in enumerate("kv"):
                size = torch.Size(shape).numel()
                scale = 0.01 * (1 + 2 * layer + place) + 0.001 * torch.arange(size)
                tensors[f"model.layers.{layer}.self_attn.{form.format(*each * 2)}"] = scale.reshape(shape)

    return add


EACH = torch.tensor([[0.01, 0.01, 0.02, 0.02], [0.03, 0.03, 0.04, 0.04]])


@pytest.mark.parametrize("form", ["{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "attn.{}_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 1)])
def test_scales_of_a_checkpoint(world: World, tmp_path: Path, form: str, shape: tuple[int, ...]) -> None:
    """By every name; of a layer, or of each head."""
    folder = checkpoint(world, tmp_path, scales_by_layer(form, *shape), SCHEME)
    model = load_llama(folder, torch.float64, CPU, TORCH)
    assert model.kv_scales is not None
    by_head = 0.001 * torch.tensor([0.0, 1.0, 0.0, 1.0]) if len(shape) == 3 else 0
    torch.testing.assert_close(model.kv_scales, EACH + by_head)


@pytest.mark.parametrize("form", ["{}_scale", "{}_proj.output_scale"])
@pytest.mark.parametrize("name", ["fp8-channels", "fp8", "packed-4"])
def test_scales_beside_quantised_weights(world: World, tmp_path: Path, name: str, form: str) -> None:
    """One checkpoint with both: its weights and its scales are those of two that have one each."""
    target, whole = world.folder / "target", tmp_path / "whole"
    quantize_folder(target, whole, name)
    weights = load_llama(whole, torch.float64, CPU, TORCH)
    edit_tensors(whole, scales_by_layer(form))
    quantization = json.loads((whole / "config.json").read_text())["quantization_config"]
    edit_json(whole / "config.json", quantization_config={**quantization, "kv_cache_scheme": SCHEME})
    model = load_llama(whole, torch.float64, CPU, TORCH)
    assert model.kv_scales is not None
    torch.testing.assert_close(model.kv_scales, EACH)
    assert model.config.kv_cache_dtype == "fp8_e4m3"
    rows, drawn = torch.arange(4), torch.Generator().manual_seed(1)
    for one, other in zip(model.layers, weights.layers, strict=True):
        assert isinstance(one, LlamaLayer)
        assert isinstance(other, LlamaLayer)
        x = torch.randn(4, one.qkv_proj.weight.shape[1], dtype=torch.float64, generator=drawn)
        assert torch.equal(one.qkv_proj(x), other.qkv_proj(x))
    assert torch.equal(model.embed_tokens(rows), weights.embed_tokens(rows))
    found = []
    for drafter in (None, world.draft("eagle")):
        llm = LLM(whole, drafter, dtype="float32", kernels="native", adaptive_drafts=False)
        assert llm.engine.worker.cache.target.dtype == torch.float8_e4m3fn
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        found.append(llm.generate([PROMPT], params, use_tqdm=False)[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_checkpoint_with_scales_is_stored_by_them(world: World, tmp_path: Path, kernels: str) -> None:
    """`auto` follows the checkpoint; another kind of code measures its scales, which then differ between tokens."""
    folder = checkpoint(world, tmp_path, scales_by_layer("{}_scale", 2, 1, 1), SCHEME)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def stored(kv_cache_dtype: str, draft: Path | None) -> tuple[torch.dtype, Tensor, list[int]]:
        settings = {"dtype": "float32", "kernels": kernels, "block_size": SIZE, "adaptive_drafts": False}
        llm = LLM(folder, draft, kv_cache_dtype=kv_cache_dtype, **settings)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        cache = llm.engine.worker.cache
        scales = torch.stack([kv_entries.scales_of(kv) for kv in cache.target_layers])
        return cache.target.dtype, scales[:, scales[0, :, 0].isfinite() & (scales[0, :, 0] > 0)], output.token_ids

    expected = (EACH + 0.001 * torch.tensor([0.0, 1.0, 0.0, 1.0])).bfloat16()
    plain = stored("auto", None)
    for dtype, scales, tokens in (plain, stored("auto", world.draft("eagle3")), stored("fp8", None)):
        assert dtype == torch.float8_e4m3fn
        assert scales.shape[1] >= len(PROMPT) + 11
        assert (scales == expected[:, None]).all()
        assert tokens == plain[2]
    for name in ("int8", "fp8_e5m2"):
        dtype, scales, _ = stored(name, None)
        assert dtype == kv_entries.KV_DTYPES[name]
        assert len(scales[0, :, 0].unique()) > 10


def test_what_a_scheme_says_without_scales(world: World, tmp_path: Path) -> None:
    folder = checkpoint(world, tmp_path, None, {**SCHEME, "type": "int"})
    assert LLM(folder, None, kernels="torch").engine.worker.cache.target.dtype == torch.int8


def test_a_draft_model_may_have_another_cache(world: World) -> None:
    found = []
    for settings in ({}, {"draft_kv_cache_dtype": "fp8_e5m2"}, {"draft_kv_cache_dtype": "auto"}):
        llm = LLM(
            world.folder / "target",
            world.draft("eagle"),
            dtype="float32",
            kv_cache_dtype="int8",
            adaptive_drafts=False,
            **settings,
        )
        cache = llm.engine.worker.cache
        assert cache.draft is not None
        assert cache.features is not None
        found.append((cache.target.dtype, cache.draft.dtype, cache.features.dtype))
    assert found == [(torch.int8, draft, torch.float32) for draft in (torch.int8, torch.float8_e5m2, torch.float32)]


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (1, 2)])
def test_ranks_with_a_checkpoints_scales(
    world: World, tmp_path: Path, ranks: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has the scales of its own layers and heads; the tokens are those of one rank."""
    monkeypatch.setattr(EngineBuilder, "_num_blocks", lambda _: 16)
    for name in ("head3", "target"):
        shutil.copytree(world.folder / name, tmp_path / name)
    checkpoint(world, tmp_path / "target", scales_by_layer("{}_scale", 2, 1, 1), SCHEME)
    other = World(tmp_path, world.target, world.tokenizer)
    settings = {"draft_kv_cache_dtype": "int8", "swap_space": 20_000 / (1 << 30)}
    with engine(other, "none", max_num_seqs=1) as llm:
        expected = texts(llm)
    with engine(other, "eagle3", ranks, pipeline_parallel_size=stages, **settings) as llm:
        assert texts(llm) == expected
        cache = llm.engine.worker.cache
        assert cache.target_scales is not None
        assert cache.target.dtype == torch.float8_e4m3fn
        whole = EACH + 0.001 * torch.tensor([0.0, 1.0, 0.0, 1.0])
        # This process is rank 0 of the last stage.
        own = whole[stages - 1 :, ::2] if ranks > 1 else whole[stages - 1 :]
        torch.testing.assert_close(cache.target_scales, own)


@pytest.mark.parametrize(("target", "draft"), [("int8", "int8"), ("fp8_e4m3", "int8")])
def test_stores_tell_dtypes_of_the_cache_apart(world: World, tmp_path: Path, target: str, draft: str) -> None:
    """Blocks of int8 and fp8 are of the same size. Where the head's alone differ, the target's are found."""
    config = disk(tmp_path)
    with connected(world, "eagle", config, kv_cache_dtype="fp8_e4m3", draft_kv_cache_dtype="fp8_e4m3") as llm:
        run(llm, [PROMPT], GREEDY)
    own = {"kv_cache_dtype": target, "draft_kv_cache_dtype": draft}
    with connected(world, "eagle", None, **own) as llm:
        expected = run(llm, [PROMPT], GREEDY)
    for loaded in (0 if target == "int8" else WHOLE, WHOLE):
        with connected(world, "eagle", config, **own) as llm:
            found = run(llm, [PROMPT], GREEDY)
        assert found.tokens == expected.tokens
        assert found.loaded == loaded


REFUSED: dict[str, tuple[Change | None, dict[str, object], str]] = {
    "4 bits": (None, {**SCHEME, "num_bits": 4}, "kv_cache_scheme = .*must have 8 bits"),
    "asymmetric": (None, {**SCHEME, "symmetric": False}, "must have 8 bits, be symmetric"),
    "unknown type": (None, {**SCHEME, "type": "nf"}, "type float or int"),
    "missing": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}),
        SCHEME,
        r"layers.0.self_attn.v_scale is missing; layers have scales of keys and values, or no layer has",
    ),
    "negative": (
        lambda tensors: [scales_by_layer("{}_scale")(tensors), tensors["model.layers.1.self_attn.v_scale"].neg_()],
        SCHEME,
        r"layers.1.self_attn.v_scale is \[-0.0.*\]; scales must be positive",
    ),
    "shape": (
        scales_by_layer("{}_scale", 3),
        SCHEME,
        r"torch.float32 \[3\]; it must be one .* of the 2 key-value heads",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_checkpoints_that_are_refused(world: World, tmp_path: Path, case: str) -> None:
    change, scheme, message = REFUSED[case]
    folder = checkpoint(world, tmp_path, change, scheme)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_llama(folder, torch.float64, CPU, TORCH)
    assert "\n" not in str(caught.value)


def test_quantised_weights_are_not_taken_for_a_cache(world: World, tmp_path: Path) -> None:
    folder = checkpoint(world, tmp_path, None, SCHEME)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["config_groups"] = {"group_0": {"weights": {"num_bits": 8}}}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="quantization_config"):
        read_llama_config(folder)


def test_settings_that_are_refused(world: World) -> None:
    target = world.folder / "target"
    with pytest.raises(
        ValueError, match="kv_cache_dtype is 'int4'; it must be one of auto, fp8, fp8_e4m3, fp8_e5m2, int8"
    ):
        LLM(target, None, kv_cache_dtype="int4")
    with pytest.raises(ValueError, match=r"draft_kv_cache_dtype is 'int8'; .* draft is 'ngram'; leave it out, or"):
        LLM(target, "ngram", draft_kv_cache_dtype="int8")
    with pytest.raises(ValueError, match=r"draft_kv_cache_dtype is 'int8'; .* draft is 'none'; leave it out, or"):
        LLM(target, None, draft_kv_cache_dtype="int8")
