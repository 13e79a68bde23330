"""Rotary positions of a GGUF file: its `rope` keys with llama.cpp's meaning, as config.json has them."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.rope import RopeConfig

# What a Llama 3.1 divides its rope frequencies by. llama.cpp writes these numbers, and not how they came about.
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Keys behind `rope.` that are read here or with the other settings, and one that says only how a model was trained.
READ = (
    "dimension_count",
    "freq_base",
    "scale_linear",
    "scaling.type",
    "scaling.factor",
    "scaling.attn_factor",
    "scaling.original_context_length",
    "scaling.finetuned",
)
# Keys that are for models of other architectures: llama.cpp computes these with the values here, whatever a file says.
FIXED = {
    "scaling.yarn_ext_factor": (-1.0, 1.0),
    "scaling.yarn_attn_factor": (1.0,),
    "scaling.yarn_beta_fast": (32.0,),
    "scaling.yarn_beta_slow": (1.0,),
    "scaling.yarn_log_multiplier": (0.0,),
    "scaling.alpha": (0.0,),
}
# What llama.cpp takes where a file names no type.
NO_TYPE = "linear"


def rope_scaling(own: Mapping[str, Any], factors: Tensor | None) -> dict[str, Any] | None:
    """Return the scaling of rotary positions as config.json has it; None for none.

    Args:
        own: a file's values by their keys behind its architecture's.
        factors: float32, what the file divides the frequencies by.

    Raises:
        CheckpointError: a key or a value that this engine would not honour, by its name.
    """
    said = {key.removeprefix("rope."): value for key, value in own.items() if key.startswith("rope.")}
    for key, value in said.items():
        if key not in READ and value not in FIXED.get(key, ()):
            raise CheckpointError(f"rope.{key} {value!r} is not supported")
    kind = said.get("scaling.type", NO_TYPE)
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"rope.scaling {kind!r} is not supported; known: none, linear, yarn")
    # The older name counts where the newer one is missing, and 0 is none.
    factor = _number(said, "scaling.factor", _number(said, "scale_linear", 0.0)) or 1.0
    amplitude = _number(said, "scaling.attn_factor", 1.0)
    if kind == "none":
        factor = 1.0
    if amplitude != 1.0 and kind != "yarn":
        raise CheckpointError(f"rope.scaling.attn_factor {amplitude:g} is supported with the scaling 'yarn' only")
    if factors is not None:
        if factor != 1.0 or kind == "yarn":
            raise CheckpointError(f"rope.scaling {kind!r} by {factor:g} is not supported beside {ROPE_FACTORS}")
        return _llama3(own, factors)
    if kind == "yarn":
        return _yarn(said, factor, amplitude)
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _number(said: Mapping[str, Any], key: str, default: float) -> float:
    value = said.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise CheckpointError(f"rope.{key} is {value!r}; it must be a number, at least 0")
    return float(value)


def _yarn(said: Mapping[str, Any], factor: float, amplitude: float) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if "scaling.original_context_length" in said:
        found["original_max_position_embeddings"] = said["scaling.original_context_length"]
    if amplitude != 1.0:
        # config.json names what cosines and sines are multiplied by, and llama.cpp a factor of that.
        found["attention_factor"] = amplitude * (1.0 + 0.1 * max(0.0, math.log(factor)))
    return found


def _llama3(own: Mapping[str, Any], factors: Tensor) -> dict[str, Any]:
    """Return the scaling of a Llama 3.1 or later whose factors are those in the file."""
    theta = float(own.get("rope.freq_base", 10000.0))
    scaling = {**LLAMA3, "factor": float(factors.max())}
    plain, scaled = (
        RopeConfig.from_json({"rope_theta": theta, "rope_scaling": each}).frequencies(2 * len(factors))[0]
        for each in (None, scaling)
    )
    if not torch.allclose(plain / scaled, factors, rtol=1e-3):
        raise CheckpointError(f"{ROPE_FACTORS} holds other factors than a Llama 3; take its folder")
    return scaling


def check_rotated(own: Mapping[str, Any], size: int) -> None:
    """Refuse rotary embeddings of a part of each head.

    Args:
        size: of a head.

    Raises:
        CheckpointError: the file names another number of rotated dimensions.
    """
    rotated = own.get("rope.dimension_count", size)
    if rotated != size:
        raise CheckpointError(f"rope.dimension_count {rotated} of {size} is not supported")
