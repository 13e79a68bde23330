"""Random Llama checkpoints, norm weights included, and changes to their tensors on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.fakes import save_random_llama


def save_llama(folder: Path, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any) -> LlamaForCausalLM:
    """Save a random Llama as `save_random_llama` does, but with random norm weights."""
    model = save_random_llama(folder, seed, **overrides)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
