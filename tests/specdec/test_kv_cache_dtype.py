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
from specdec.building.engine_builder import EngineBuilder
from specdec.cache.kv_cache import KVCache, KVDtypes, entry_bytes
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_layer import ComposedMixer
from specdec.kernels.types import kv_entries
from specdec.models.llama import load_llama, read_llama_config
from tests.coded_cache import CODES, numbers_of
from tests.fakes import edit_json, save_random_llama
from tests.kernel_sets import TORCH
from tests.new_groups import new_group
from tests.profiles import by_day
from tests.quantized_checkpoints import quantize_folder
from tests.specdec.kv_transfer.engines import GREEDY, PROMPT, SIZE, WHOLE, disk, run
from tests.specdec.kv_transfer.engines import engine as connected
from tests.specdec.parallel.ranked_engine import engine, texts
from tests.specdec.saved_llama import edit_tensors
from tests.specdec.world import World

pytestmark = pytest.mark.slow

QUANTIZATION = {"quant_method": "compressed-tensors", "config_groups": {}}
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
CPU = torch.device("cpu")
Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(("head_dim", "kv_heads", "least"), [(64, 2, 1.88), (128, 8, 1.96)])
@pytest.mark.parametrize("code", CODES)
def test_a_token_takes_half_the_bytes(
    world: World, head_dim: int, kv_heads: int, least: float, code: torch.dtype
) -> None:
    """Of the target alone. Scales that are stored with each token, of int8 alone, take a bit more."""
    config = replace(read_llama_config(world.folder / "target"), head_dim=head_dim, num_kv_heads=kv_heads)
    plain, dtypes = entry_bytes(config, None, torch.bfloat16), KVDtypes(code, torch.bfloat16)
    assert plain == 2 * 2 * kv_heads * head_dim * 2
    assert plain == 2 * entry_bytes(config, None, torch.bfloat16, dtypes, torch.ones(2, 2 * kv_heads))
    times = plain / entry_bytes(config, None, torch.bfloat16, dtypes)
    assert least < times < 2 if code == torch.int8 else times == 2


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_twice_the_requests_run_in_the_same_memory(tmp_path: Path, kernels: str) -> None:
    """Counted: requests of one step, each of which needs three blocks."""
    memory = 60 * SIZE * 2 * (4 * 64 * 2)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    save_random_llama(tmp_path / "plain", head_dim=64)
    for kind in ("int", "float"):
        shutil.copytree(tmp_path / "plain", tmp_path / kind)
        edit_tensors(tmp_path / kind, scales_by_layer("{}_scale"))
        edit_json(
            tmp_path / kind / "config.json",
            quantization_config={**QUANTIZATION, "kv_cache_scheme": SCHEME | {"type": kind}},
        )

    def most(folder: str, kv_cache_dtype: str) -> int:
        llm = LLM(
            tmp_path / folder,
            None,
            dtype="bfloat16",
            kernels=kernels,
            kv_cache_memory=memory,
            kv_cache_dtype=kv_cache_dtype,
            block_size=SIZE,
            max_num_seqs=64,
            max_model_len=40,
            watermark=0,
        )
        groups = [new_group(llm, [3 + i] * 18, params) for i in range(64)]
        for group in groups:
            llm.engine.scheduler.add(group.requests[0])
        running = []
        while llm.engine.has_unfinished:
            llm.engine.step()
            running.append(llm.stats().running)
        return max(running)

    assert most("plain", "auto") == 20
    assert [most("plain", name) for name in ("fp8", "fp8_e5m2")] == [40, 40]
    assert [most(folder, "auto") for folder in ("int", "float")] == [40, 40]
    # Each token's heads have a scale.
    assert most("plain", "int8") == 37


def checkpoint(world: World, folder: Path, scales: Change | None, scheme: dict[str, object] | None) -> Path:
    """Write the world's target with scales and a scheme of its keys and values."""
    shutil.copytree(world.folder / "target", folder, dirs_exist_ok=True)
    if scales is not None:
        edit_tensors(folder, scales)
    quantization = {**QUANTIZATION, "kv_cache_scheme": scheme} if scheme else None
    edit_json(folder / "config.json", quantization_config=quantization)
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
    for one, other in zip(model.mixers, weights.mixers, strict=True):
        assert isinstance(one, ComposedMixer)
        assert isinstance(other, ComposedMixer)
        x = torch.randn(4, model.config.hidden_size, dtype=torch.float64, generator=drawn)
        assert torch.equal(one.products["qkv"](x), other.products["qkv"](x))
    assert torch.equal(model.embed_tokens(rows), weights.embed_tokens(rows))
    found = []
    for drafter in (None, world.draft("eagle")):
        llm = LLM(whole, drafter, dtype="float32", kernels="native", adaptive_drafts=False)
        assert llm.engine.worker.cache.target.dtype == torch.float8_e4m3fn
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        found.append(llm.generate([PROMPT], params, use_tqdm=False)[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("kind", ["float", "int"])
def test_a_checkpoint_with_scales_is_stored_by_them(world: World, tmp_path: Path, kernels: str, kind: str) -> None:
    """`auto` follows the checkpoint, and slots hold codes alone; another kind of code has its own scales."""
    folder = checkpoint(world, tmp_path, scales_by_layer("{}_scale", 2, 1, 1), {**SCHEME, "type": kind})
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def run_with(folder: Path, kv_cache_dtype: str, draft: Path | None = None) -> tuple[KVCache, list[int]]:
        settings = {"dtype": "float32", "kernels": kernels, "block_size": SIZE, "adaptive_drafts": False}
        llm = LLM(folder, draft, kv_cache_dtype=kv_cache_dtype, **settings)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        return llm.engine.worker.cache, output.token_ids

    def rows(numbers: Tensor) -> set[tuple[float, ...]]:
        return {tuple(row) for row in numbers.flatten(1).tolist()}

    def coded_rows(dtype: torch.dtype, scales: Tensor | None) -> set[tuple[float, ...]]:
        return rows(kv_entries.dequantize(*kv_entries.quantize(written, dtype, scales), torch.float64))

    # The first layer's keys and values do not depend on what the cache makes of others. Those of the prompt:
    plain = run_with(world.folder / "target", "auto")[0].target_layers[0]
    written = plain[:SIZE][plain[:SIZE].isfinite().all(-1).all(-1)]
    assert len(written) == SIZE
    scales = EACH[0] + 0.001 * torch.tensor([0.0, 1.0, 0.0, 1.0])
    code, other = (torch.int8, "fp8_e4m3") if kind == "int" else (torch.float8_e4m3fn, "int8")
    cache, tokens = run_with(folder, "auto")
    for made, found in (
        (cache, tokens),
        run_with(folder, "auto", world.draft("eagle3")),
        run_with(folder, {"int": "int8", "float": "fp8"}[kind]),
    ):
        assert made.target.dtype == code
        assert made.parts["target"][0].nbytes == 2 * SIZE * 4 * 8
        assert coded_rows(code, scales) <= rows(numbers_of(made.target_layers[0], scales))
        assert found == tokens
    for name in (other, "fp8_e5m2"):
        made, _ = run_with(folder, name)
        own = kv_entries.KV_DTYPES[name]
        assert made.target.dtype == own
        assert coded_rows(own, None) <= rows(numbers_of(made.target_layers[0]))


def test_fp8_without_scales_is_warned_of(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for scales, count in ((None, 1), (scales_by_layer("{}_scale"), 0)):
        folder = checkpoint(world, tmp_path / str(count), scales, SCHEME)
        with caplog.at_level("WARNING", "specdec"):
            LLM(folder, None, kernels="torch")
        assert [record.message.count("beyond 448 become 448") for record in caplog.records] == [1] * count
        caplog.clear()


def test_a_scheme_without_scales_is_followed(world: World, tmp_path: Path) -> None:
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


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "stages"), by_day([(2, 1), (1, 2), (4, 1)], 2))
def test_ranks_with_a_checkpoints_scales(
    world: World, tmp_path: Path, ranks: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has the scales of its own layers and heads; the tokens are those of one rank."""
    monkeypatch.setattr(EngineBuilder, "_num_blocks", lambda _: 16)
    for name in ("head3", "target"):
        shutil.copytree(world.folder / name, tmp_path / name)
    checkpoint(world, tmp_path / "target", scales_by_layer("{}_scale", 2, 1, 1), SCHEME)
    other = World(tmp_path, world.target, world.tokenizer)
    settings = {"draft_kv_cache_dtype": "int8"}
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


@pytest.mark.long
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
