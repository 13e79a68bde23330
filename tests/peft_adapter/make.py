"""Writes the adapter of this folder with PEFT, and the logits that PEFT computes with it, in float64.

    python -m tests.peft_adapter.make

PEFT is no dependency: `pip install peft` first. The files here are of PEFT 0.21.2 and transformers 5.23.0.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent
SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
TOKENS = [5, 6, 7, 3, 20, 11, 5, 6]


def base_model() -> LlamaForCausalLM:
    """A Llama whose weights no random generator makes, so that every version of torch has the same."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.float64)
    with torch.no_grad():
        for place, (name, weight) in enumerate(sorted(model.named_parameters())):
            numbers = torch.arange(weight.numel(), dtype=torch.float64).view_as(weight)
            wave = torch.sin(1.7 * numbers + place) + torch.sin(0.31 * numbers * numbers)
            weight.copy_(1 + 0.1 * wave if name.endswith("norm.weight") else wave / math.sqrt(weight.shape[-1]))
    model.name_or_path = "org/tiny"
    return model


def adapted(**settings: Any) -> Any:
    """PEFT's model with an adapter whose second matrices are not 0, as they begin."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(base_model(), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.2)
    # What is stored, and therefore what is computed here, is of float32.
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.float().double()
    return model.eval()


def main() -> None:
    model = adapted(
        r=8,
        lora_alpha=12,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_rslora=True,
        rank_pattern={"k_proj": 2, r"layers\.1\.mlp\.up_proj": 5},
        alpha_pattern={"down_proj": 3, "model.layers.0.self_attn.q_proj": 20},
    )
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.float()
    model.save_pretrained(FOLDER)
    (FOLDER / "README.md").unlink(missing_ok=True)
    (FOLDER / "logits.json").write_text(json.dumps(logits.tolist()))


if __name__ == "__main__":
    main()
