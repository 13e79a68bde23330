"""Quantised keys and values as checkpoints ask for them: compressed-tensors' `kv_cache_scheme`, and scales by layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError

# By the scheme's `type`.
KV_TYPES = {"float": "fp8_e4m3", "int": "int8"}
# Names of a layer's scales: compressed-tensors', the older ones of AutoFP8 and ModelOpt, which vLLM reads as well, and
# vLLM's own. {} is k or v.
NAMES = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "kv_scale")


def kv_cache_dtype_of(config: Mapping[str, Any]) -> str | None:
    """Return the cache dtype that a config.json asks for, None if it asks for none.

    Raises:
        CheckpointError: another scheme than 8 bits, symmetric.
    """
    quantization = config.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if scheme is None:
        return None
    given = scheme if isinstance(scheme, Mapping) else {}
    kind = KV_TYPES.get(str(given.get("type", "float")))
    if given.get("num_bits") != 8 or not given.get("symmetric", True) or kind is None:
        raise CheckpointError(
            f"config.json: kv_cache_scheme = {scheme!r:.200} is not supported; it must have 8 bits, be symmetric, and "
            "be of type float or int"
        )
    return kind


def quantizes_kv_alone(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json's `quantization_config` concerns keys and values and no weights."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "compressed-tensors":
        return False
    return quantization.get("kv_cache_scheme") is not None and not quantization.get("config_groups")


def is_kv_scale(name: str) -> bool:
    """Return whether a checkpoint's tensor is a scale of keys or values."""
    _, marked, part = name.partition(".self_attn.")
    return bool(marked) and any(part == form.format(*each * 2) for form in NAMES for each in "kv")


def is_attention_scale(name: str) -> bool:
    """Return whether a checkpoint's tensor is a scale of queries or attention weights, which are not rounded here."""
    _, marked, part = name.partition(".self_attn.")
    return bool(marked) and part.removeprefix("attn.") in ("q_scale", "prob_scale")


def take_kv_scales(tensors: dict[str, Tensor], num_layers: int, kv_heads: int) -> Tensor | None:
    """Remove the scales of keys and values from a checkpoint's tensors, and return them.

    Returns:
        float32 `[layers, 2 * kv_heads]`, keys first, as the cache has its heads; None where the checkpoint has none.

    Raises:
        CheckpointError: a scale that is missing, of another shape, or not positive.
    """
    found = {name: tensors.pop(name) for name in list(tensors) if is_kv_scale(name)}
    if not found:
        return None
    rows = []
    for layer in range(num_layers):
        for each in "kv":
            names = [f"layers.{layer}.self_attn.{form.format(*each * 2)}" for form in NAMES]
            name = next((name for name in names if name in found), None)
            if name is None:
                raise CheckpointError(f"{names[0]} is missing; layers have scales of keys and values, or no layer has")
            rows.append(_checked(name, found[name], kv_heads))
    return torch.stack(rows).view(num_layers, 2 * kv_heads)


def _checked(name: str, scale: Tensor, kv_heads: int) -> Tensor:
    """Return a scale of all heads together, or one of each head, as `[kv_heads]`."""
    if scale.numel() not in (1, kv_heads) or not scale.is_floating_point():
        raise CheckpointError(
            f"{name} is {scale.dtype} {list(scale.shape)}; it must be one floating-point number, or one of each of the "
            f"{kv_heads} key-value heads"
        )
    scale = scale.float().flatten()
    if not scale.is_meta and not bool(((scale > 0) & scale.isfinite()).all()):
        raise CheckpointError(f"{name} is {scale.tolist()!r:.80}; scales must be positive")
    return scale.expand(kv_heads)
