"""LoRA adapters in PEFT's format, trained for some seconds: of a target, and of a head for an adapted target."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

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

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Windows of a step of the target's training, and their tokens; conversations of a step of the head's.
BATCH, WINDOW, DRAFT_BATCH = 8, 128, 4
RATE, DRAFT_RATE = 2e-3, 1e-3
UNROLL = 4


def train_adapter(target: Path, folder: Path, tokens: list[int], rank: int, steps: int) -> tuple[float, float]:
    """Train an adapter of every layer to predict a text, and write it.

    Args:
        tokens: the text.
        steps: of Adam, each over 8 windows of 128 tokens.

    Returns:
        Mean loss of the first and of the last five steps, in nats.
    """
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).requires_grad_(False)
    pairs, text = dict[str, nn.Parameter](), torch.tensor(tokens)
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear) and name.endswith(MODULES):
            pairs |= _adapt(part, rank, {name: part.out_features})

    def loss(_: int) -> Tensor:
        starts = torch.randint(0, len(tokens) - WINDOW, (BATCH,), generator=generator)
        batch = text[starts[:, None] + torch.arange(WINDOW)]
        found: Tensor = model(input_ids=batch, labels=batch).loss
        return found

    losses = _train(pairs, RATE, steps, loss)
    _save(folder, pairs, rank, target_modules=list(MODULES))
    return losses


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
    pairs = _adapt_head(head, rank)
    trainer = kind.trainer(head, source.model.weights.lm_head_weight, LossSettings("ce", UNROLL))

    def loss(step: int) -> Tensor:
        batch = source.batch([(step * DRAFT_BATCH + i) % len(samples) for i in range(DRAFT_BATCH)])
        found: Tensor = trainer(batch).total
        return found

    losses = _train(pairs, DRAFT_RATE, steps, loss)
    _save(folder, pairs, rank)
    return losses


def _train(
    pairs: Mapping[str, nn.Parameter], rate: float, steps: int, loss: Callable[[int], Tensor]
) -> tuple[float, float]:
    """Train matrices by the loss of each step; return the mean loss of the first and of the last five steps."""
    optimizer, losses = torch.optim.Adam(pairs.values(), rate), list[float]()
    for step in range(steps):
        found = loss(step)
        optimizer.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(found.item())
    return sum(losses[:5]) / len(losses[:5]), sum(losses[-5:]) / len(losses[-5:])


def _save(folder: Path, pairs: Mapping[str, nn.Parameter], rank: int, **settings: Sequence[str]) -> None:
    """Write an adapter whose scale is 2, with `settings` in its config beside the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{name}.weight": weight.detach().contiguous() for name, weight in pairs.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _adapt_head(head: nn.Module, rank: int) -> dict[str, nn.Parameter]:
    """Add a low-rank product to each projection of a head; return the matrices by PEFT's names."""
    found: dict[str, nn.Parameter] = {}
    layers = [layer for layer in head.get_submodule("layers").children() if isinstance(layer, DecoderLayer)]
    for number, layer in enumerate(layers):
        linears = layer.linears | layer.mlp.linears
        for name, product in adapted_products(layer.config, layer.input_size).items():
            parts = {f"layers.{number}.{part.module}": part.columns for part in product.parts}
            found |= _adapt(linears[name], rank, parts)
    return found


def _adapt(linear: nn.Linear, rank: int, parts: Mapping[str, int]) -> dict[str, nn.Parameter]:
    """Add a low-rank product, scaled by 2, to each part of a projection; return the matrices by PEFT's names.

    Args:
        parts: columns of the projection, by the names of its parts in order.
    """
    found, inputs = dict[str, nn.Parameter](), linear.in_features
    for name, columns in parts.items():
        found[f"{name}.lora_A"] = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))
        found[f"{name}.lora_B"] = nn.Parameter(torch.zeros(columns, rank))

    def add(_: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
        pairs = ((found[f"{name}.lora_A"], found[f"{name}.lora_B"]) for name in parts)
        return out + 2 * torch.cat([given[0] @ down.T @ up.T for down, up in pairs], -1)

    linear.register_forward_hook(add)
    return found
