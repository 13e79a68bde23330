"""Baichuan against a dense twin: ALiBi in chains and trees, packed weights, normalised heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec import LLM, DraftShape, SamplingParams
from specdec.cache.kv_cache import KVCache
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_config import LlamaConfig, alibi_slopes
from specdec.execution.model_runner import ModelRunner
from specdec.kernels.kernel_set import choose_kernels
from specdec.kernels.native.library import library_file
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.quantized_tensor import QuantizedTensor
from specdec.kernels.types.settings import KernelChoice
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.models.llama import load_llama, normalised
from tests.baichuan import CONFIG, NORMALISED, ROTARY, Baichuan, save_baichuan, slopes
from tests.fakes import edit_json, save_random_eagle3, save_random_head
from tests.kernel_sets import TORCH
from tests.kernels.attention_cases import climb
from tests.profiles import num_cases
from tests.quantized_checkpoints import quantize_folder
from tests.quantized_rows import random_rows
from tests.roundings import close_calls
from tests.specdec.chunked_pass import CPU, chunked_logits, random_tokens
from tests.specdec.models.published_configs import TWINS
from tests.strategies import draft_trees, shuffled_tables

pytestmark = pytest.mark.slow

# Heads whose number is no power of two, as Baichuan-13B's 40.
SIX = {"hidden_size": 48, "num_attention_heads": 6}
SMALL = {"hidden_size": 24, "num_hidden_layers": 1}
MODELS = {"13b": {}, "six heads": SIX, "7b": ROTARY, "baichuan 2": {**SIX, **NORMALISED, **SMALL}}
models = pytest.mark.parametrize("overrides", MODELS.values(), ids=list(MODELS))


def test_slopes_are_the_papers() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    for heads in (1, 2, 3, 6, 12, 16, 20, 40, 71):
        assert alibi_slopes(heads) == pytest.approx(slopes(heads), rel=1e-14)
        assert len(alibi_slopes(heads)) == heads


@models
def test_logits_equal_the_twins_in_chunks(tmp_path: Path, overrides: dict[str, Any]) -> None:
    model, tokens = save_baichuan(tmp_path, **overrides), random_tokens(70)
    expected = model(torch.tensor([tokens])).logits[0]
    assert 1 < expected.abs().max() < 100
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        assert (chunked_logits(tmp_path, dtype, tokens) - expected).abs().max() < tolerance


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Baichuan]:
    folder = tmp_path_factory.mktemp("six")
    return folder, save_baichuan(folder, **SIX)


@pytest.mark.long
@settings(max_examples=num_cases(15))
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 70), st.integers(1, 12), draft_trees(max_nodes=16, vocab_size=97)),
        min_size=1,
        max_size=3,
    ),
    kind=st.sampled_from([("torch", torch.float64, 1e-9), ("native", torch.float32, 1e-4)]),
    seed=st.integers(0, 100),
)
@example([(20, 3, DraftTree((5, 6) * 35, tuple(range(-1, 69))))], ("native", torch.float32, 1e-4), 0)
def test_logits_of_trees_equal_the_twins_of_each_path(
    six: tuple[Path, Baichuan],
    requests: list[tuple[int, int, Any]],
    kind: tuple[KernelChoice, torch.dtype, float],
    seed: int,
) -> None:
    """Several rows of a step; the rest of the cache is NaN."""
    choice, dtype, tolerance = kind
    if choice == "native" and library_file() is None:
        return
    folder, twin = six
    kernels = choose_kernels(choice, CPU, dtype, 1)
    model = load_llama(folder, dtype, CPU, kernels)
    texts = [random_tokens(cached + known, seed + i) for i, (cached, known, _) in enumerate(requests)]
    plan = shuffled_tables([len(text) + len(tree) for text, (_, _, tree) in zip(texts, requests, strict=True)], 8, seed)
    cache = KVCache(plan.num_blocks, 8, model.config, None, dtype, CPU, kernels=kernels)
    cache.target.fill_(torch.nan)
    runner = ModelRunner(model, cache, dtype)
    empty = HostTrees.empty(1)
    with torch.inference_mode():
        for text, table, (cached, _, _) in zip(texts, plan.tables, requests, strict=True):
            if cached:
                runner.forward([TreeRow(text[:cached], 0, table, num_scored=1)], empty)
        rows = [
            TreeRow(text[cached:], cached, table, num_scored=known)
            for text, table, (cached, known, _) in zip(texts, plan.tables, requests, strict=True)
        ]
        logits = runner.forward(rows, HostTrees([tree for *_, tree in requests])).double()
    expected = list[Tensor]()
    with close_calls(twin) as close:
        for text, (cached, _, tree) in zip(texts, requests, strict=True):
            expected += twin(torch.tensor([text])).logits[0, cached:]
            for node in range(len(tree)):
                path = [tree.tokens[above] for above in climb(tree, node)]
                expected.append(twin(torch.tensor([[*text, *path]])).logits[0, -1])
    assume(dtype != torch.float64 or not any(close))
    assert (logits - torch.stack(expected)).abs().max() < tolerance


@pytest.mark.long
@pytest.mark.parametrize("head", ["eagle", "eagle3", "itself"])
@pytest.mark.parametrize(("kernels", "dtype"), [("torch", "float64"), ("native", "float32")])
def test_drafted_tokens_equal_the_twins(tmp_path: Path, head: str, kernels: KernelChoice, dtype: str) -> None:
    """A head is a Llama's layer with rotary embeddings; a model that drafts for itself is accepted to the end."""
    if kernels == "native" and library_file() is None:
        pytest.skip("the native kernels are not built here")
    model, draft = save_baichuan(tmp_path / "target"), tmp_path / "head"
    if head == "itself":
        draft = tmp_path / "target"
    else:
        (save_random_head if head == "eagle" else save_random_eagle3)(draft)
    prompts = [random_tokens(count) for count in (1, 9, 30)]
    shape = DraftShape(4, 1, 4) if head == "itself" else DraftShape(4, 4, 12)
    llm = LLM(tmp_path / "target", draft, dtype=dtype, kernels=kernels, shape=shape, adaptive_drafts=False)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=21, ignore_eos=True), use_tqdm=False)
    assert [output.token_ids for output in outputs] == [model.greedy(prompt, 21) for prompt in prompts]
    if head == "itself":
        assert [output.stats.tau for output in outputs] == [5.0] * 3


@pytest.mark.parametrize("name", ["fp8-channels", "awq"])
def test_a_quantised_packed_matrix_is_read_in_parts(tmp_path: Path, name: str) -> None:
    save_baichuan(tmp_path / "plain")
    twin, prompt = Baichuan(CONFIG), random_tokens(9)
    twin.load_state_dict(quantize_folder(tmp_path / "plain", tmp_path / "stored", name))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = LLM(tmp_path / "stored", "ngram", dtype="float64")
    assert llm.generate([prompt], params, use_tqdm=False)[0].token_ids == twin.greedy(prompt, 12)


@pytest.mark.parametrize("name", TWINS)
def test_published_models_are_told_apart(name: str) -> None:
    config = LlamaConfig.from_json(TWINS[name])
    assert config.max_position == 4096
    assert config.num_kv_heads == config.num_heads
    has_alibi = "13B" in name
    assert len(config.alibi_slopes) == (40 if has_alibi else 0)
    assert config.rope.rope_type == ("none" if has_alibi else "default")
    assert config.normalised_head == ("Baichuan2" in name)


def rows_less(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.W_pack.weight"] = tensors["model.layers.0.self_attn.W_pack.weight"][1:].clone()
    save_file(tensors, folder / "model.safetensors")


def test_unsupported_settings_are_refused(tmp_path: Path) -> None:
    for changes, message in (
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported beside ALiBi"),
        ({"sliding_window": 8}, "sliding_window = 8 is not supported"),
        ({**NORMALISED, "tie_word_embeddings": True}, "tie_word_embeddings is not supported with a normalised head"),
    ):
        with pytest.raises(CheckpointError, match=message):
            LlamaConfig.from_json({**CONFIG, **changes})
    with pytest.raises(CheckpointError, match="lm_head is quantised, which a normalised head cannot be"):
        normalised(QuantizedTensor(random_rows("int8", 32, 32, 32), torch.float32), torch.float32)
    save_baichuan(tmp_path)
    rows_less(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers.0.self_attn.W_pack.weight has 95 rows"):
        load_llama(tmp_path, torch.float64, CPU, TORCH)


def test_a_rope_type_of_ours_is_no_setting(tmp_path: Path) -> None:
    save_baichuan(tmp_path)
    edit_json(tmp_path / "config.json", model_type="llama", rope_scaling={"rope_type": "none"})
    with pytest.raises(CheckpointError, match="rope type 'none' is not supported"):
        load_llama(tmp_path, torch.float64, CPU, TORCH)
