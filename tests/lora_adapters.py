"""Random LoRA adapters in PEFT's format, and targets into which they are merged."""

import copy
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec import LoRARequest

Model = TypeVar("Model", bound=PreTrainedModel)
MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def save_adapter(
    folder: Path,
    model: PreTrainedModel,
    rank: int = 4,
    seed: int = 0,
    modules: Sequence[str] = MODULES,
    ranks: Mapping[str, int] | None = None,
    size: float = 0.3,
    **settings: Any,
) -> Path:
    """Write a random adapter of a model.

    Args:
        ranks: of modules whose name ends so, where it is another.
        size: of the numbers in the second matrices.
        settings: of adapter_config.json.
    """
    shapes = {name: tuple(part.weight.shape) for name, part in model.named_modules() if name.endswith(tuple(modules))}
    return write_adapter(folder, shapes, rank, seed, ranks, size, **settings)


def save_draft_adapter(folder: Path, head: Path, rank: int = 4, seed: int = 0, size: float = 0.3) -> Path:
    """Write a random adapter of all layers of a draft model in a folder."""
    shapes = {name: tuple(tensor.shape) for name, tensor in draft_modules(head).items()}
    return write_adapter(folder, shapes, rank, seed, None, size)


def draft_modules(head: Path) -> dict[str, Tensor]:
    """Weights of a draft model's adapted modules."""
    tensors = load_file(head / "model.safetensors")
    return {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.removesuffix(".weight").endswith(MODULES)
    }


def save_merged_draft(folder: Path, head: Path, adapter: Path) -> Path:
    """Write a draft model with an adapter merged into its weights."""
    shutil.copytree(head, folder)
    tensors, low = load_file(head / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, weight in draft_modules(head).items():
        down, up = (low[f"base_model.model.{name}.lora_{letter}.weight"].double() for letter in "AB")
        # The scale of `write_adapter`.
        tensors[f"{name}.weight"] = weight.double() + 2 * up @ down
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    seed: int,
    ranks: Mapping[str, int] | None,
    size: float,
    **settings: Any,
) -> Path:
    """Write a random adapter of modules with weights of these shapes; see `save_adapter`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (columns, inputs) in shapes.items():
        own = next((rank for end, rank in (ranks or {}).items() if name.endswith(end)), rank)
        down = torch.randn(own, inputs, generator=generator) / math.sqrt(inputs)
        up = torch.randn(columns, own, generator=generator) * size
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/target",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": dict(ranks or {}),
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model: Model, folder: Path) -> Model:
    """A copy of a model with an adapter merged into its weights, as PEFT's `merge_and_unload` does."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    found = copy.deepcopy(model)
    for name, part in found.named_modules():
        down = tensors.get(f"base_model.model.{name}.lora_A.weight")
        if down is None:
            continue
        alphas = config.get("alpha_pattern") or {}
        matching = [alpha for key, alpha in alphas.items() if re.match(rf"(.*\.)?({key})$", name)]
        alpha = matching[0] if matching else config["lora_alpha"]
        scale = alpha / (math.sqrt(len(down)) if config.get("use_rslora") else len(down))
        up = tensors[f"base_model.model.{name}.lora_B.weight"]
        with torch.no_grad():
            part.weight += scale * (up.double() @ down.double()).to(part.weight.dtype)
    return found


def request_for(folder: Path, number: int) -> LoRARequest:
    """The request for an adapter, which is called as its folder."""
    return LoRARequest(folder.name, number, str(folder))
