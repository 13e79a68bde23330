"""LoRA adapters in PEFT's format. What is not honoured is refused."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import (
    CheckpointError,
    check_finite,
    check_weight_dtypes,
    error_context,
    listed,
    read_object,
)
from specdec.draft_heads.llama.unreadable_files import missing_path
from specdec.draft_heads.llama.weight_files import load_tensors
from specdec.kernels.types.adapters import LayerAdapter, LowRank
from specdec.models.adapter_layout import AdapterLayout

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Settings that change what an adapter computes, with the only values that are supported.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
# Ways to begin that change the base weights too, unless PEFT converts the adapter when it saves it.
_CHANGING_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_TENSOR = re.compile(r"(?:layers\.(\d+)|midlayer)\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_PREFIXES = ("base_model.model.", "model.")


class AdapterFiles(NamedTuple):
    """Folders of an adapter: of the target and of the draft model, None for the one that has none."""

    target: Path | None
    draft: Path | None = None


class AdapterWeights(NamedTuple):
    """A rank's part of an adapter: layers of the target and of the draft model, None for the one that has none."""

    target: Sequence[LayerAdapter] | None
    draft: Sequence[LayerAdapter] | None = None


def read_adapter(
    folder: Path, layout: AdapterLayout, max_rank: int, dtype: torch.dtype, *, of: str = "target"
) -> list[LayerAdapter]:
    """Read an adapter for a model, strictly.

    Its scale, alpha / rank or with rank-stabilised LoRA (2312.03732) alpha / sqrt(rank), is in the second matrices.

    Args:
        layout: of the model's layers.
        max_rank: the largest rank that is allowed.
        of: what errors call the model.

    Returns:
        Each layer's adapter, in `dtype`.

    Raises:
        CheckpointError: no adapter, one that does not fit the model, a rank above `max_rank`, or a feature that is not
            supported.
    """
    if not folder.is_dir():
        raise CheckpointError(missing_path(folder))
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: not a LoRA adapter in PEFT's format: it holds no {name}")
    settings, tensors = read_object(folder / CONFIG), load_tensors(folder / WEIGHTS)
    with error_context(folder):
        _check_settings(settings)
        scales = _Scales(settings, max_rank, dtype)
        pairs = _pairs(tensors, layout, of)
        check_finite(tensors, dtype)
        return [
            {
                name: [
                    _low_rank(pairs, f"layers.{layer}.{part.module}", (product.inputs, part.columns), scales, of)
                    for part in product.parts
                ]
                for name, product in products.items()
            }
            for layer, products in enumerate(layout)
        ]


def _check_settings(settings: Mapping[str, Any]) -> None:
    for name, allowed in _REQUIRED.items():
        value = settings.get(name, allowed[-1])
        if value not in allowed:
            raise CheckpointError(f"{CONFIG}: {name} = {value!r:.60} is not supported; it must be {allowed[0]!r}")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGING_BASE):
        raise CheckpointError(
            f"{CONFIG}: init_lora_weights = {start!r} changes the base weights; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )


class _Scales:
    """Ranks and scales that a configuration gives to its modules.

    Args:
        max_rank: the largest rank that is allowed.
        dtype: of scaled matrices.
    """

    def __init__(self, settings: Mapping[str, Any], max_rank: int, dtype: torch.dtype) -> None:
        self.max_rank, self.dtype = max_rank, dtype
        self.rank, self.alpha = (_number(name, settings.get(name)) for name in ("r", "lora_alpha"))
        self.is_stabilised = settings.get("use_rslora") is True
        self.ranks, self.alphas = (_patterns(settings, name) for name in ("rank_pattern", "alpha_pattern"))

    def of(self, modules: Sequence[str]) -> tuple[float, float]:
        """Return rank and scale of a module, by its names in the model."""
        rank, alpha = _matching(self.ranks, modules, self.rank), _matching(self.alphas, modules, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.is_stabilised else rank)


_Patterns = list[tuple[re.Pattern[str], float]]


def _matching(patterns: _Patterns, modules: Sequence[str], other: float) -> float:
    """Return the number of the first pattern that one of the names matches."""
    return next((number for pattern, number in patterns if any(map(pattern.match, modules))), other)


def _patterns(settings: Mapping[str, Any], name: str) -> _Patterns:
    """Read names or regular expressions of modules with a number each, as PEFT matches them: behind a dot."""
    given = settings.get(name) or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{CONFIG}: {name} is {given!r:.60}; it must be an object")
    found = []
    for key, value in given.items():
        try:
            pattern = re.compile(rf"(.*\.)?({key})$")
        except re.error as error:
            raise CheckpointError(f"{CONFIG}: {name} holds {key!r:.60}, no regular expression: {error}") from None
        found.append((pattern, _number(name, value)))
    return found


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise CheckpointError(f"{CONFIG}: {name} holds {value!r:.60}; it must be a number above 0")
    return value


class _Module(NamedTuple):
    """The two matrices of an adapted module by their letters, and the module's names in the model."""

    matrices: dict[str, Tensor]
    names: tuple[str, ...]


def _pairs(tensors: Mapping[str, Tensor], layout: AdapterLayout, of: str) -> dict[str, _Module]:
    """Return the modules that an adapter has, by their names in the layout."""
    check_weight_dtypes(tensors)
    known = {part.module for product in layout[0].values() for part in product.parts}
    found: dict[str, _Module] = {}
    foreign = []
    for name, tensor in tensors.items():
        bare = _without_prefixes(name)
        match = _TENSOR.fullmatch(bare)
        # EAGLE-3's official name of a head's first layer.
        layer = int((match[1] or 0) if match else 0)
        if match is None or match[2] not in known or layer >= len(layout) or (match[1] is None and of == "target"):
            foreign.append(name)
            continue
        own = f"layers.{layer}.{match[2]}"
        names = f"model.{own}", bare[: match.end(2)]
        found.setdefault(own, _Module({}, names)).matrices[match[3]] = tensor
    if foreign:
        modules = ", ".join(sorted(module.rpartition(".")[2] for module in known))
        raise CheckpointError(
            f"tensors that are not supported: {listed(sorted(foreign))}; adapters are for {modules} of the {of}'s "
            f"{len(layout)} layers"
        )
    if not found:
        raise CheckpointError(f"{WEIGHTS}: no tensors")
    return found


def _without_prefixes(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _low_rank(modules: Mapping[str, _Module], name: str, sizes: tuple[int, int], scales: _Scales, of: str) -> LowRank:
    """Return a module's matrices, scaled; those of rank 0 for a module that is not adapted.

    Args:
        sizes: inputs and columns of its weight.
    """
    (inputs, columns), dtype = sizes, scales.dtype
    module = modules.get(name)
    if module is None:
        return LowRank(torch.zeros(0, inputs, dtype=dtype), torch.zeros(columns, 0, dtype=dtype))
    for which in "AB":
        if which not in module.matrices:
            raise CheckpointError(f"{name}: missing tensor lora_{which}")
    down, up = module.matrices["A"], module.matrices["B"]
    rank, scale = scales.of(module.names)
    if down.shape != (rank, inputs) or up.shape != (columns, rank):
        raise CheckpointError(
            f"{name}: lora_A has shape {list(down.shape)} and lora_B {list(up.shape)}; rank {rank:g} and the {of} "
            f"say [{rank:g}, {inputs}] and [{columns}, {rank:g}]"
        )
    if rank > scales.max_rank:
        raise CheckpointError(
            f"{name}: rank {rank:g} is more than max_lora_rank {scales.max_rank}; raise max_lora_rank"
        )
    return LowRank(down.to(dtype), (up.double() * scale).to(dtype))
