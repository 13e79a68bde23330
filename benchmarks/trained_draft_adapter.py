"""A LoRA adapter of a draft head, trained for some seconds on what an adapted target says, in PEFT's format."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specdec.draft_heads.llama.llama_layer import DecoderLayer
from specdec.kernels.kernel_set import torch_kernels
from specdec.kernels.types.adapters import AdapterRows, StackedAdapters
from specdec.models.adapter_layout import adapted_products, attach_adapters, target_layout
from specdec.models.llama import load_llama
from specdec.models.lora_adapter import read_adapter
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.passes.features import FeatureBatch, OnlineFeatures
from specdec.train_eagle.training.head_export import from_folder
from specdec.train_eagle.training.head_trainer import LossSettings

BATCH = 4
RATE = 1e-3
UNROLL = 4


class AdaptedTarget:
    """Features of conversations by a target with an adapter."""

    def __init__(self, target: Path, adapter: Path, samples: list[Sample], taps: tuple[int, ...], rank: int) -> None:
        device = torch.device("cpu")
        kernels = torch_kernels(device)
        self.model = load_llama(target, torch.float32, device, kernels)
        bank = attach_adapters(self.model, kernels, 1, rank)
        assert isinstance(bank, StackedAdapters)
        bank.put(1, read_adapter(adapter, target_layout(self.model.config), rank, torch.float32))
        self._bank, self._features = bank, OnlineFeatures(self.model, samples, taps)

    def batch(self, conversations: list[int]) -> FeatureBatch:
        """Return some conversations; all rows have the adapter."""
        rows = sum(self._features.lengths[i] for i in conversations)
        self._bank.rows = AdapterRows(torch.arange(rows), torch.tensor([[1, 0, rows]], dtype=torch.int32))
        return self._features.batch(conversations)


def train_draft_adapter(
    target: Path, adapter: Path, draft: Path, folder: Path, samples: list[Sample], rank: int, steps: int
) -> tuple[float, float]:
    """Train an adapter of a head to draft for a target with an adapter, and write it.

    Args:
        samples: conversations that the adapted target has answered.
        steps: of Adam, each over 4 conversations.

    Returns:
        Mean loss of the first and of the last five steps.
    """
    torch.manual_seed(0)
    kind, given, *_ = from_folder(draft, target)
    source = AdaptedTarget(target, adapter, samples, given.taps, rank)
    tokens = given.get_buffer("draft_tokens") if hasattr(given, "draft_tokens") else None
    head = kind.new(source.model.weights, tokens, {})
    own = {name: tensor.float() for name, tensor in given.state_dict().items() if name != "embed_tokens.weight"}
    head.load_state_dict(own, strict=False)
    head.float().requires_grad_(False)
    weights = _adapt(head, rank)
    trainer = kind.trainer(head, source.model.weights.lm_head_weight, LossSettings("ce", UNROLL))
    optimizer, losses = torch.optim.Adam(weights.values(), RATE), list[float]()
    for step in range(steps):
        batch = source.batch([(step * BATCH + i) % len(samples) for i in range(BATCH)])
        loss = trainer(batch).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{name}.weight": weight.detach().contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return sum(losses[:5]) / len(losses[:5]), sum(losses[-5:]) / len(losses[-5:])


def _adapt(head: nn.Module, rank: int) -> dict[str, nn.Parameter]:
    """Add a low-rank product to each projection of a head, scaled by 2; return the matrices by PEFT's names."""
    found: dict[str, nn.Parameter] = {}
    layers = [layer for layer in head.get_submodule("layers").children() if isinstance(layer, DecoderLayer)]
    for number, layer in enumerate(layers):
        linears = layer.linears | layer.mlp.linears
        for name, product in adapted_products(layer.config, layer.input_size).items():
            pairs = []
            for part in product.parts:
                down = nn.Parameter(torch.randn(rank, product.inputs) / math.sqrt(product.inputs))
                pairs.append((down, nn.Parameter(torch.zeros(part.columns, rank))))
                module = f"layers.{number}.{part.module}.lora_"
                found |= {f"{module}A": pairs[-1][0], f"{module}B": pairs[-1][1]}

            def add(
                _: nn.Module, given: tuple[Tensor], out: Tensor, pairs: list[tuple[nn.Parameter, nn.Parameter]] = pairs
            ) -> Tensor:
                return out + 2 * torch.cat([given[0] @ down.T @ up.T for down, up in pairs], -1)

            linears[name].register_forward_hook(add)
    return found
