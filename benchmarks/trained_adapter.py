"""A LoRA adapter of every layer, trained for some seconds on conversations, in PEFT's format."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WINDOW = 128
BATCH = 8
RATE = 2e-3


class _Adapted(nn.Module):
    """A linear layer with an adapter beside it; its scale is 2, as with an alpha of twice the rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x @ self.down.T @ self.up.T
        found: Tensor = self.base(x) + 2 * added
        return found


def train_adapter(target: Path, folder: Path, tokens: list[int], rank: int, steps: int) -> tuple[float, float]:
    """Train an adapter to predict a text, and write it.

    Args:
        tokens: the text.
        steps: of Adam, each over 8 windows of 128 tokens.

    Returns:
        Mean loss of the first and of the last five steps, in nats.
    """
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).requires_grad_(False)
    adapted: dict[str, _Adapted] = {}
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear) and name.endswith(MODULES):
            adapted[name] = _Adapted(part, rank)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, adapted[name])
    weights = [weight for part in adapted.values() for weight in (part.down, part.up)]
    optimizer, losses, text = torch.optim.Adam(weights, RATE), list[float](), torch.tensor(tokens)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - WINDOW, (BATCH,), generator=generator)
        batch = text[starts[:, None] + torch.arange(WINDOW)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, part in adapted.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = part.down.detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = part.up.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(MODULES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return sum(losses[:5]) / len(losses[:5]), sum(losses[-5:]) / len(losses[-5:])
