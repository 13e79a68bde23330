"""The target against transformers' LlamaForCausalLM on the same checkpoint folder."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from specdec import LLM, SamplingParams
from specdec.cache.kv_cache import KVCache
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_layer import PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.execution.model_runner import ModelRunner
from specdec.models.llama import LlamaModel, load_llama
from specdec.verify.tree import DraftTree
from specdec.verify.tree_batch import TreeBatch, TreeRow
from tests.fakes import TINY, edit_json, save_random_head, save_random_llama
from tests.kernel_sets import TORCH
from tests.strategies import shuffled_tables

CPU = torch.device("cpu")
VOCAB = TINY["vocab_size"]
BLOCK = 8
# Chunks that end inside blocks, at their ends, and with a single token.
CHUNKS = (5, 3, 1, 13, 16, 1, 31)


def save_llama(folder: Path, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any) -> LlamaForCausalLM:
    """As `save_random_llama`, with norm weights that differ too."""
    model = save_random_llama(folder, seed, **overrides)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def load_hf(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    # Its eager attention would run the softmax in float32.
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def new_cache(model: LlamaModel, num_blocks: int, dtype: torch.dtype) -> KVCache:
    return KVCache(num_blocks, BLOCK, model.config, None, dtype, CPU, kernels=TORCH)


def chunked_logits(folder: Path, dtype: torch.dtype, tokens: Sequence[int], chunks: Sequence[int] = CHUNKS) -> Tensor:
    """Logits of all positions, the prompt fed chunk by chunk through the engine's own pieces."""
    assert sum(chunks) == len(tokens)
    model = load_llama(folder, dtype, CPU, TORCH)
    plan = shuffled_tables([len(tokens)], BLOCK, seed=0)
    runner = ModelRunner(model, new_cache(model, plan.num_blocks, dtype), dtype)
    logits, start = [], 0
    for chunk in chunks:
        row = TreeRow(tokens[start : start + chunk], DraftTree(), start, plan.tables[0], num_scored=chunk)
        logits.append(runner.forward([row]))
        start += chunk
    return torch.cat(logits)


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
    other = {"rope_type": "linear", "rope_theta": 123.0, "factor": 3.0}
    edit_json(tmp_path / "config.json", rope_parameters=other, rope_scaling=old, rope_theta=theta)
    assert_logits_equal(tmp_path)


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
    batch = TreeBatch.pack([TreeRow(tokens, DraftTree(), 0, plan.tables[0], num_scored=0)], BLOCK, CPU)
    rope = model.config.rope.table(model.config.head_dim, 30, torch.float64)
    attentions = [PagedAttention(kv, batch.slots, batch.rows, TORCH) for kv in cache.target]
    asked = (3, 0, 2, 1)
    output = model(batch.tokens, rotary_at(rope, torch.arange(30)), attentions, asked)
    for layer, tap in zip(asked, output.taps, strict=True):
        assert (tap - expected[layer][0]).abs().max() < 1e-9
    assert (output.features - expected[-1][0]).abs().max() < 1e-9


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
    assert load_llama(tmp_path, torch.float32, CPU, TORCH).lm_head is None


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


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
    "gemma": (config_edit(model_type="gemma"), "serves llama, mistral, qwen2, qwen3"),
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
