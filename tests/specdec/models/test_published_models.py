"""The table of supported models: each one's config.json as it is on the hub, in small, against transformers."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specdec import LLM
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.models.llama import read_llama_config
from tests.specdec.chunked_pass import assert_logits_equal
from tests.specdec.models.published_configs import REFUSED, REFUSED_AS, SIZES, SUPPORTED, TOKENS, TWINS

TABLE = Path(__file__).parents[3] / "docs" / "models.md"


def write_config(folder: Path, published: dict[str, object]) -> None:
    """Write a config.json of which only sizes and tokens are other than published."""
    (folder / "config.json").write_text(json.dumps({**published, **SIZES, **TOKENS}))


@pytest.mark.parametrize("name", SUPPORTED)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    write_config(tmp_path, SUPPORTED[name])
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tmp_path)
    config.initializer_range = 0.3
    model = AutoModelForCausalLM.from_config(config).to(torch.float64)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0 if "norm" in parameter_name else 0.0, 0.2)
    tensors = dict(model.named_parameters())
    save_file({key: value.detach() for key, value in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert_logits_equal(tmp_path, {torch.float64: 1e-9}, (7, 33))


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(tmp_path: Path, name: str) -> None:
    write_config(tmp_path, REFUSED[name])
    own = REFUSED[name]["model_type"]
    with pytest.raises(
        CheckpointError, match=rf": {REFUSED_AS[name]} \(model_type '{own}'\) is not supported; this"
    ) as raised:
        LLM(tmp_path)
    assert "\n" not in str(raised.value)


def test_the_context_is_the_published_one(tmp_path: Path) -> None:
    write_config(tmp_path, SUPPORTED["meta-llama/Llama-3.1-8B-Instruct"])
    assert read_llama_config(tmp_path).max_position == 131072
    write_config(tmp_path, SUPPORTED["mistralai/Mistral-7B-Instruct-v0.1"])
    assert read_llama_config(tmp_path).max_position == 32768
    assert set(read_llama_config(tmp_path).layer_windows) == {4096}


def test_the_documents_list_these_models_and_no_others() -> None:
    listed = re.findall(r"`([\w.-]+/[\w.-]+)`", TABLE.read_text(encoding="utf-8").split("## Draft heads")[0])
    assert sorted(listed) == sorted([*SUPPORTED, *TWINS, *REFUSED])
