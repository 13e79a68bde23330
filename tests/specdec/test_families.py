"""Mistral, Qwen2 and Qwen3 against transformers, on the same checkpoint folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from specdec import LLM, SamplingParams
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.models.llama import load_llama
from tests.fakes import TINY, edit_json, save_random_head
from tests.specdec.chunked_pass import CHUNKS, CPU, chunked_logits, random_tokens

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


@pytest.mark.parametrize(("family", "overrides"), SETTINGS, ids=str)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    save_family(tmp_path, family, **overrides)
    tokens = random_tokens(sum(CHUNKS))
    for dtype, tolerance in {torch.float64: 1e-9, torch.float32: 1e-4}.items():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="sdpa").eval()
        expected = model(torch.tensor([tokens])).logits[0]
        actual = chunked_logits(tmp_path, dtype, tokens)
        assert 1 < expected.abs().max() < 100
        assert (actual - expected).abs().max() < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_tokens_equal_generate(tmp_path: Path, family: str) -> None:
    save_family(tmp_path / "target", family)
    save_random_head(tmp_path / "head")
    prompt = random_tokens(9)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64).eval()
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=None)
    llm = LLM(tmp_path / "target", tmp_path / "head", dtype="float64", adaptive_drafts=False)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert output.token_ids == expected[0, len(prompt) :].tolist()


@torch.no_grad()
def test_up_to_its_window_a_mistral_sees_all(tmp_path: Path) -> None:
    save_family(tmp_path, "mistral", sliding_window=40)
    assert load_llama(tmp_path, torch.float64, CPU).config.max_position == 40
    tokens = random_tokens(40)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="sdpa").eval()
    expected = model(torch.tensor([tokens])).logits[0]
    actual = chunked_logits(tmp_path, torch.float64, tokens, (7, 33))
    assert (actual - expected).abs().max() < 1e-9
    with pytest.raises(ValueError, match="max_position_embeddings 40"):
        LLM(tmp_path, dtype="float64", max_model_len=41)


def test_a_window_that_is_not_used_does_not_count(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen2")
    edit_json(tmp_path / "config.json", sliding_window=16, use_sliding_window=False)
    assert load_llama(tmp_path, torch.float64, CPU).config.max_position == TINY["max_position_embeddings"]
    edit_json(tmp_path / "config.json", use_sliding_window=True)
    with pytest.raises(CheckpointError, match="sliding_window = 16 is not supported"):
        load_llama(tmp_path, torch.float64, CPU)


def test_what_a_config_leaves_out_is_its_familys(tmp_path: Path) -> None:
    save_family(tmp_path, "mistral", num_attention_heads=8, num_key_value_heads=8, head_dim=4)
    edit_json(tmp_path / "config.json", num_key_value_heads=None, max_position_embeddings=None)
    config = load_llama(tmp_path, torch.float64, CPU).config
    assert (config.num_kv_heads, config.max_position) == (8, 131072)
