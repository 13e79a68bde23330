"""Mistral, Qwen2 and Qwen3 against transformers, on the same checkpoint folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from specdec import LLM, DraftShape, SamplingParams
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.kernels.native.library import library_file
from specdec.kernels.types.settings import KernelChoice
from specdec.models.llama import load_llama
from tests.fakes import TINY, edit_json, save_random_head
from tests.kernel_sets import TORCH
from tests.specdec.chunked_pass import CPU, assert_logits_equal, random_tokens

FAMILIES: dict[str, type[PreTrainedConfig]] = {"mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def save_family(folder: Path, family: str, **overrides: Any) -> None:
    """A random model, its norms and biases too."""
    torch.manual_seed(3)
    sizes = {**TINY, "initializer_range": 0.3, "head_dim": 8, **({"sliding_window": None} | overrides)}
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**sizes)).to(torch.float64)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


SETTINGS = [
    ("mistral", {}),
    ("mistral", {"head_dim": 16, "num_key_value_heads": 1}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 16, "attention_bias": True}),
]
KINDS = ["sliding_attention", "full_attention"]
# Windows shorter than the texts. Attention of `max_window_layers` layers of Qwen sees all.
SLIDING = [
    ("mistral", {"sliding_window": 8}),
    ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": KINDS}),
]


@pytest.mark.parametrize(("family", "overrides"), SETTINGS + SLIDING, ids=str)
def test_logits_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    save_family(tmp_path, family, **overrides)
    assert_logits_equal(tmp_path, {torch.float64: 1e-9, torch.float32: 1e-4})


WITHOUT_EFFECT = [
    ("mistral", {"attention_bias": True}),
    ("mistral", {"mlp_bias": True}),
    ("mistral", {"sliding_window": 40, "use_sliding_window": False}),
    ("mistral", {"sliding_window": 40, "layer_types": ["full_attention", "full_attention"]}),
    ("qwen2", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"sliding_window": 16, "use_sliding_window": None}),
    ("qwen3", {"sliding_window": 16, "use_sliding_window": None}),
    ("qwen3", {"mlp_bias": True}),
]


@pytest.mark.parametrize(("family", "changes"), WITHOUT_EFFECT, ids=str)
def test_settings_without_effect_in_transformers_have_none_here(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    save_family(tmp_path, family)
    config = tmp_path / "config.json"
    edit_json(config, **changes)
    assert_logits_equal(tmp_path, {torch.float64: 1e-9}, (7, 36))


@pytest.mark.long
@pytest.mark.parametrize(("family", "overrides"), [*((family, {}) for family in FAMILIES), *SLIDING], ids=str)
@pytest.mark.parametrize(("kernels", "dtype"), [("torch", "float64"), ("native", "float32")])
def test_drafted_tokens_equal_generate(
    tmp_path: Path, family: str, overrides: dict[str, Any], kernels: KernelChoice, dtype: str
) -> None:
    if kernels == "native" and library_file() is None:
        pytest.skip("the native kernels are not built here")
    save_family(tmp_path / "target", family, **overrides)
    save_random_head(tmp_path / "head")
    prompt = random_tokens(9)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64).eval()
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=None)
    shape = DraftShape(4, 4, 8)
    llm = LLM(tmp_path / "target", tmp_path / "head", dtype=dtype, kernels=kernels, shape=shape, adaptive_drafts=False)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert output.token_ids == expected[0, len(prompt) :].tolist()


def test_trees_deeper_than_a_window_are_refused(tmp_path: Path) -> None:
    save_family(tmp_path, "mistral", sliding_window=8)
    with pytest.raises(ValueError, match=r"draft_nodes 9 .* window of 8 tokens"):
        LLM(tmp_path, draft="ngram", dtype="float64", shape=DraftShape(4, 4, 9))


def test_a_window_that_is_not_used_does_not_count(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen2")
    edit_json(tmp_path / "config.json", sliding_window=16, use_sliding_window=False)
    assert load_llama(tmp_path, torch.float64, CPU, TORCH).config.max_position == TINY["max_position_embeddings"]
    edit_json(tmp_path / "config.json", use_sliding_window=True)
    assert load_llama(tmp_path, torch.float64, CPU, TORCH).config.windows == ()
    edit_json(tmp_path / "config.json", max_window_layers=1, layer_types=None)
    assert load_llama(tmp_path, torch.float64, CPU, TORCH).config.windows == (0, 16)


def leave_out(config: Path, *keys: str) -> None:
    """Remove keys of a config.json, and no other that is null."""
    values = json.loads(config.read_text())
    config.write_text(json.dumps({key: value for key, value in values.items() if key not in keys}))


def test_settings_left_out_are_the_familys(tmp_path: Path) -> None:
    save_family(tmp_path, "mistral", num_attention_heads=8, num_key_value_heads=8, head_dim=4)
    leave_out(tmp_path / "config.json", "num_key_value_heads", "max_position_embeddings")
    config = load_llama(tmp_path, torch.float64, CPU, TORCH).config
    assert (config.num_kv_heads, config.max_position) == (8, 131072)


def test_a_mistral_without_a_word_of_its_window_has_transformers_default(tmp_path: Path) -> None:
    save_family(tmp_path, "mistral", max_position_embeddings=32768)
    assert load_llama(tmp_path, torch.float64, CPU, TORCH).config.windows == ()
    leave_out(tmp_path / "config.json", "sliding_window")
    window = AutoConfig.from_pretrained(tmp_path).sliding_window
    assert load_llama(tmp_path, torch.float64, CPU, TORCH).config.windows == (window, window) == (4096, 4096)


@pytest.mark.parametrize("window", [0, -1, "64", 1.5])
def test_a_window_that_is_no_number_of_tokens_is_refused(tmp_path: Path, window: object) -> None:
    save_family(tmp_path, "mistral")
    edit_json(tmp_path / "config.json", sliding_window=window)
    with pytest.raises(CheckpointError, match=r"sliding_window = .* must be a positive whole number"):
        load_llama(tmp_path, torch.float64, CPU, TORCH)
