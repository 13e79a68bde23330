"""The target against transformers' LlamaForCausalLM on the same checkpoint folder."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from specdec import LLM, SamplingParams
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.execution.model_runner import LONGEST_MEASURED, ModelRunner
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import TreeRow
from specdec.models.llama import load_llama, read_llama_config
from specdec.verify.tree_batch import TreeBatch
from tests.fakes import edit_json, save_random_head
from tests.kernel_sets import TORCH
from tests.specdec.chunked_pass import BLOCK, CHUNKS, CPU, chunked_logits, new_cache, random_tokens
from tests.specdec.saved_llama import edit_tensors, save_llama
from tests.strategies import shuffled_tables

pytestmark = pytest.mark.slow


def load_hf(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    # Its eager attention would run the softmax in float32.
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("cached", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_rotations_are_computed_in_the_dtype_asked_for_whatever_the_cache_keeps(
    tmp_path: Path, cached: torch.dtype
) -> None:
    save_llama(tmp_path)
    model = load_llama(tmp_path, torch.float64, CPU, TORCH)
    expected = ModelRunner(model, new_cache(model, 2, torch.float64), torch.float64).rope
    found = ModelRunner(model, new_cache(model, 2, cached), torch.float64).rope
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@torch.no_grad()
def assert_logits_equal(folder: Path, tolerances: dict[torch.dtype, float] | None = None) -> None:
    tokens = random_tokens(sum(CHUNKS))
    for dtype, tolerance in (tolerances or {torch.float64: 1e-9, torch.float32: 1e-4}).items():
        expected = load_hf(folder, dtype)(torch.tensor([tokens])).logits[0]
        actual = chunked_logits(folder, dtype, tokens)
        assert 1 < expected.abs().max() < 50, "logits of another size would make the tolerance mean something else"
        assert (actual - expected).abs().max() < tolerance


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
    },
    "yarn-untruncated": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
        "truncate": False,
    },
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_logits_equal_transformers_for_each_group_size(tmp_path: Path, kv_heads: int) -> None:
    save_llama(tmp_path, num_key_value_heads=kv_heads)
    assert_logits_equal(tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        {"head_dim": 16},
        {"head_dim": 4, "num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
        {"rms_norm_eps": 0.5},
        {"num_hidden_layers": 1},
    ],
    ids=str,
)
def test_logits_equal_transformers_for_each_setting(tmp_path: Path, overrides: dict[str, Any]) -> None:
    save_llama(tmp_path, **overrides)
    assert_logits_equal(tmp_path)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("kind", ROPES)
def test_logits_equal_transformers_for_each_rope_and_spelling(tmp_path: Path, kind: str, spelling: str) -> None:
    rope = dict(ROPES[kind])
    save_llama(tmp_path)
    if spelling == "rope_parameters":
        rope.setdefault("rope_type", "default")
        edit_json(tmp_path / "config.json", rope_parameters=rope)
    else:
        theta = rope.pop("rope_theta")
        if spelling == "type" and rope:
            rope["type"] = rope.pop("rope_type")
        edit_json(tmp_path / "config.json", rope_parameters=None, rope_theta=theta, rope_scaling=rope or None)
    assert_logits_equal(tmp_path)


@pytest.mark.parametrize("spelling", ["nothing", "null"])
def test_logits_equal_transformers_where_no_rope_is_spelled(tmp_path: Path, spelling: str) -> None:
    save_llama(tmp_path)
    edit_json(tmp_path / "config.json", rope_parameters=None)
    if spelling == "null":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": None}))
    assert_logits_equal(tmp_path)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_logits_equal_transformers_where_the_original_length_stands_outside_the_rope(tmp_path: Path, kind: str) -> None:
    rope = dict(ROPES[kind])
    original = rope.pop("original_max_position_embeddings")
    save_llama(tmp_path)
    edit_json(tmp_path / "config.json", rope_parameters=rope, original_max_position_embeddings=original)
    assert_logits_equal(tmp_path)


@pytest.mark.parametrize("theta", [None, 700.0])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_logits_equal_transformers_where_both_spellings_stand(tmp_path: Path, kind: str, theta: float | None) -> None:
    """`rope_scaling` counts, and no number of `rope_parameters`."""
    old = dict(ROPES[kind])
    del old["rope_theta"]
    save_llama(tmp_path)
    # Without a theta elsewhere, this one would be lost, which is refused.
    other = {"rope_type": "linear", "factor": 3.0, **({} if theta is None else {"rope_theta": 123.0})}
    edit_json(tmp_path / "config.json", rope_parameters=other, rope_scaling=old, rope_theta=theta)
    assert_logits_equal(tmp_path)


@pytest.mark.long
def test_yarn_makes_the_context_longer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Added as Qwen's cards say, whose max_position_embeddings (40960) is neither the original length nor the new."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen3 = {"rope_scaling": yarn, "rope_theta": 1e6, "max_position_embeddings": 40960, "rope_parameters": None}
    save_llama(tmp_path)
    sizes = json.loads((tmp_path / "config.json").read_text())
    with caplog.at_level(logging.INFO, "specdec"):
        assert LlamaConfig.from_json({**sizes, **qwen3}).max_position == 131072
    assert "131072 positions by YaRN's factor 4 of 32768, instead of max_position_embeddings 40960" in caplog.text
    with pytest.raises(CheckpointError, match=r"YaRN's factor 1e\+09 makes .* positions, too many"):
        LlamaConfig.from_json({**sizes, **qwen3, "rope_scaling": {**yarn, "factor": 1e9}})

    def logits(max_position: int) -> torch.Tensor:
        rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
        edit_json(tmp_path / "config.json", max_position_embeddings=max_position, rope_parameters=rope)
        return chunked_logits(tmp_path, torch.float64, random_tokens(sum(CHUNKS)))

    assert torch.equal(logits(40), logits(128))


def test_other_names_of_the_same_settings(tmp_path: Path) -> None:
    save_llama(tmp_path)
    scaling = {"rope_type": "linear", "factor": 3.0}
    edit_json(tmp_path / "config.json", rope_scaling=scaling, rope_theta=700.0)
    expected = read_llama_config(tmp_path)
    older = {"rope_type": None, "type": "linear", "factor": 3.0}
    edit_json(tmp_path / "config.json", rope_scaling=older, hidden_act="swish")
    assert read_llama_config(tmp_path) == expected


def test_ropes_differ_so_that_the_comparison_can_fail(tmp_path: Path) -> None:
    save_llama(tmp_path)
    tokens, seen = random_tokens(sum(CHUNKS)), []
    for rope in ROPES.values():
        edit_json(tmp_path / "config.json", rope_parameters={"rope_type": "default", **rope})
        seen.append(chunked_logits(tmp_path, torch.float64, tokens))
    # Dynamic scaling starts beyond the context, so it equals the default of its theta; all others differ.
    for i, one in enumerate(seen):
        assert all((one - other).abs().max() > 1e-3 for other in seen[:i])


def test_logits_equal_transformers_for_several_shards(tmp_path: Path) -> None:
    save_llama(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_logits_equal(tmp_path)


def test_logits_equal_transformers_for_pytorch_model_bin(tmp_path: Path) -> None:
    save_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert_logits_equal(tmp_path)


@pytest.mark.parametrize("chunks", [(70,), (1,) * 12 + (58,), (8, 8, 16, 38)], ids=["one", "single", "blocks"])
def test_logits_do_not_depend_on_chunks(tmp_path: Path, chunks: tuple[int, ...]) -> None:
    save_llama(tmp_path)
    tokens = random_tokens(70)
    expected = chunked_logits(tmp_path, torch.float64, tokens, CHUNKS)
    assert (chunked_logits(tmp_path, torch.float64, tokens, chunks) - expected).abs().max() < 1e-9


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_low_precision_logits_are_near_float32(tmp_path: Path, dtype: torch.dtype, eps: float) -> None:
    save_llama(tmp_path)
    tokens = random_tokens(sum(CHUNKS))
    actual = chunked_logits(tmp_path, dtype, tokens)
    assert actual.dtype == dtype
    expected = chunked_logits(tmp_path, torch.float32, tokens)
    # Relative to the spread of the logits, a few dozen roundings.
    assert (actual.float() - expected).norm() / expected.norm() < 16 * eps


@torch.no_grad()
def test_taps_and_features_equal_transformers_hidden_states(tmp_path: Path) -> None:
    save_llama(tmp_path, num_hidden_layers=4)
    tokens = random_tokens(30)
    expected = load_hf(tmp_path, torch.float64)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    model = load_llama(tmp_path, torch.float64, CPU, TORCH)
    plan = shuffled_tables([30], BLOCK, seed=0)
    cache = new_cache(model, plan.num_blocks, torch.float64)
    batch = TreeBatch.pack([TreeRow(tokens, 0, plan.tables[0], num_scored=0)], HostTrees.empty(1), BLOCK, CPU)
    rope = model.config.rope.table(model.config.head_dim, 30, torch.float64)
    attentions = [PagedAttention(kv, batch.slots, batch.rows, TORCH) for kv in cache.target]
    asked = (3, 0, 2, 1)
    output = model(batch.tokens, rotary_at(rope, torch.arange(30)), attentions, asked)
    for layer, tap in zip(asked, output.taps, strict=True):
        assert (tap - expected[layer][0]).abs().max() < 1e-9
    assert (output.features - expected[-1][0]).abs().max() < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("with_head", [False, True], ids=["plain", "eagle"])
def test_greedy_tokens_equal_transformers_generate(tmp_path: Path, with_head: bool) -> None:
    save_llama(tmp_path / "target")
    hf = load_hf(tmp_path / "target", torch.float64)
    hf.generation_config.eos_token_id = None
    groups = [[random_tokens(size, seed=10 * size + i) for i in range(4)] for size in (1, 2, 17, 40, 64)]
    expected = []
    for group in groups:
        ids = torch.tensor(group)
        out = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64, pad_token_id=0)
        expected += out[:, ids.shape[1] :].tolist()
    if with_head:
        save_random_head(tmp_path / "head")
    head = tmp_path / "head" if with_head else None
    llm = LLM(tmp_path / "target", head, dtype="float64", device="cpu", max_num_batched_tokens=64, block_size=BLOCK)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate([prompt for group in groups for prompt in group], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == 20


def test_tied_checkpoint_that_stores_the_matrix_twice_loads(tmp_path: Path) -> None:
    save_llama(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_llama(tmp_path, torch.float32, CPU, TORCH).weights.lm_head is None


@pytest.mark.long
@pytest.mark.parametrize("with_head", [False, True], ids=["plain", "eagle"])
def test_positions_beyond_the_longest_request_have_no_rotary_embeddings(tmp_path: Path, with_head: bool) -> None:
    save_llama(tmp_path / "target", max_position_embeddings=20000)
    save_random_head(tmp_path / "head")
    head = tmp_path / "head" if with_head else None
    settings: dict[str, Any] = {"dtype": "float64", "device": "cpu", "adaptive_drafts": False}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = [random_tokens(size) for size in (3, 50, 63)]
    expected = LLM(tmp_path / "target", head, max_model_len=64, **settings).generate(prompts, params)
    edit_json(tmp_path / "target" / "config.json", max_position_embeddings=10**9)
    llm = LLM(tmp_path / "target", head, max_model_len=64, **settings)
    assert len(llm.engine.worker.runner.rope) == LONGEST_MEASURED
    assert [output.token_ids for output in llm.generate(prompts, params)] == [output.token_ids for output in expected]
    with pytest.raises(ValueError, match=r"max_position_embeddings is 1000000000; set max_model_len to \d+ or less"):
        LLM(tmp_path / "target", head, **settings)
    with pytest.raises(ValueError, match=r"max_model_len is 100000000; set max_model_len to \d+ or less"):
        LLM(tmp_path / "target", head, max_model_len=10**8, **settings)


@pytest.mark.long
def test_requests_longer_than_what_is_measured_have_their_positions(tmp_path: Path) -> None:
    save_llama(tmp_path, max_position_embeddings=20000, num_hidden_layers=1)
    llm = LLM(tmp_path, draft=None, dtype="float32", device="cpu", max_model_len=9000, prefill_stretch=0)
    assert len(llm.engine.worker.runner.rope) == 9000
    (output,) = llm.generate([random_tokens(8990)], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    assert len(output.token_ids) == 10


@pytest.mark.parametrize("positions", [1, 2])
def test_a_model_of_one_position_is_refused(tmp_path: Path, positions: int) -> None:
    save_llama(tmp_path)
    edit_json(tmp_path / "config.json", max_position_embeddings=positions)
    with nullcontext() if positions > 1 else pytest.raises(ValueError, match="max_position_embeddings is 1; "):
        llm = LLM(tmp_path, draft=None, dtype="float32", device="cpu")
        assert len(llm.generate([[5]], SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids) == 1
