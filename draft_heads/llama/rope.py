"""Rotary frequencies of the rope types found in Llama checkpoints, and their cosine and sine tables."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, flag, section

# Cosines and signed sines at the rows' positions, `[rows, 1, head_dim]` each, as `kernels.rotate_` takes them.
Rotary = tuple[Tensor, Tensor]

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding settings of a checkpoint, in either of the two spellings of config.json."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @classmethod
    def from_json(cls, config: Mapping[str, Any], max_position: int = 2048) -> "RopeConfig":
        """Read `rope_scaling` (before transformers 5) or else `rope_parameters`, and `rope_theta` beside them.

        Where both are given, transformers 5 takes `rope_scaling` too.

        Args:
            max_position: positions of the model.

        Raises:
            CheckpointError: an unknown rope type, a missing or unusable number, two thetas, or one that would be lost.
        """
        spelling, values = _spelled(config)
        if any(isinstance(value, Mapping) for value in values.values()):
            raise CheckpointError(f"config.json: {spelling} of its own for each layer type is not supported")
        kinds = (values.get(key) for key in ("rope_type", "type"))
        kind = next((kind for kind in kinds if kind is not None), "default")
        if kind not in ROPE_TYPES:
            raise CheckpointError(f"config.json: rope type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
        if values.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (1, 1.0, None):
            raise CheckpointError("config.json: partial_rotary_factor other than 1 is not supported")

        def number(name: str, default: float | None, above: float = 0.0) -> float:
            value = values.get(name)
            if value is None:
                value = default
            if value is None:
                raise CheckpointError(f"config.json: rope type {kind!r} needs {name!r}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < 1e18:
                raise CheckpointError(f"config.json: rope {name!r} is {value!r}; it must be a number above {above:g}")
            return float(value)

        original = max(1.0, number("original_max_position_embeddings", max_position))
        factor_default = max_position / original if kind == "yarn" and "factor" in values else None
        theta, other = config.get("rope_theta"), config.get("rope_parameters")
        inner = values.get("rope_theta")
        if None not in (theta, inner) and theta != inner:
            raise CheckpointError(
                f"config.json: rope_theta is {theta!r:.100} at the top and {inner!r:.100} in {spelling}; "
                "remove the wrong one"
            )
        lost = other.get("rope_theta") if theta is None and isinstance(other, Mapping) else None
        if lost not in (None, values.get("rope_theta", cls.theta)):
            raise CheckpointError(
                f"config.json: rope_theta {lost!r:.100} of rope_parameters does not hold beside rope_scaling; "
                "put it into rope_scaling too"
            )
        return cls(
            rope_type=kind,
            theta=number("rope_theta", 10000.0 if theta is None else theta, above=1.0 if kind == "yarn" else 0.0),
            factor=1.0 if kind == "default" else number("factor", factor_default),
            original_max_position=int(original),
            low_freq_factor=number("low_freq_factor", None if kind == "llama3" else 1.0),
            high_freq_factor=number("high_freq_factor", None if kind == "llama3" else 4.0),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=number("attention_factor", 1.0) if values.get("attention_factor") is not None else None,
            mscale=number("mscale", 1.0) if values.get("mscale") else 0.0,
            mscale_all_dim=number("mscale_all_dim", 1.0) if values.get("mscale_all_dim") else 0.0,
            truncate=flag(values, "truncate", True),
        )

    def longest_context(self, config: Mapping[str, Any], max_position: int) -> int:
        """Return how many positions a model has, `max_position` by its max_position_embeddings.

        Who adds YaRN as the cards of Qwen's models say leaves that number as it is; vLLM goes by YaRN's then.
        """
        if self.rope_type != "yarn" or _spelled(config)[1].get("original_max_position_embeddings") is None:
            return max_position
        return max(max_position, int(self.original_max_position * self.factor))

    def frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        """Return the frequencies of pairs of dimensions, float32 `[head_dim / 2]`, and the factor of cos and sin.

        `dynamic` (NTK-aware) equals `default` up to `max_position_embeddings`, which is where this engine's
        contexts end. Beyond it, the rotation of a key would depend on how long its request grows later.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse = 1.0 / (self.theta**exponents)
        if self.rope_type == WITHOUT_ROTATION.rope_type:
            return torch.zeros_like(inverse), 1.0
        if self.rope_type == "linear":
            return inverse / self.factor, 1.0
        if self.rope_type == "llama3":
            return self._llama3(inverse), 1.0
        if self.rope_type == "yarn":
            return self._yarn(self.theta**exponents, head_dim), self._yarn_scale()
        return inverse, 1.0

    def _llama3(self, inverse: Tensor) -> Tensor:
        """Scale as Llama 3.1 does: stretch long wavelengths by `factor`, keep short ones, blend those between."""
        wavelength = 2 * math.pi / inverse
        longest = self.original_max_position / self.low_freq_factor
        shortest = self.original_max_position / self.high_freq_factor
        span = self.high_freq_factor - self.low_freq_factor
        blend = (self.original_max_position / wavelength - self.low_freq_factor) / span
        blended = (1 - blend) * inverse / self.factor + blend * inverse
        stretched = torch.where(wavelength > longest, inverse / self.factor, blended)
        return torch.where(wavelength < shortest, inverse, stretched)

    def _yarn(self, powers: Tensor, head_dim: int) -> Tensor:
        """Scale by YaRN (Peng et al. 2023): interpolation ramps in between `beta_fast` and `beta_slow` rotations."""

        def dimension(rotations: float) -> float:
            turns = self.original_max_position / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        keep = 1 - ramp
        return (1.0 / (self.factor * powers)) * (1 - keep) + (1.0 / powers) * keep

    def _yarn_scale(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)

        def scale(weight: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)

    def table(self, head_dim: int, positions: int, dtype: torch.dtype) -> Tensor:
        """Return cosines and signed sines of every position, `[positions, 2, 1, head_dim]`; `rotary_at` reads them.

        Angles are float32 whatever the dtype, as in transformers.
        """
        inverse, scale = self.frequencies(head_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)[:, :, None].to(dtype)


def _spelled(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the key of config.json whose settings count, and these settings."""
    spelling = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values = dict(section(config, spelling))
    # Beside the rope's own settings it has priority, as in transformers.
    outer = config.get("original_max_position_embeddings")
    return spelling, values if outer is None else {**values, "original_max_position_embeddings": outer}


# Of models whose attention knows positions otherwise: each angle is 0, and numbers stay as they are.
WITHOUT_ROTATION = RopeConfig("none")


def rotary_at(table: Tensor, positions: Tensor) -> Rotary:
    """Return the table's rows at `positions` (int64 `[rows]`)."""
    cos, sin = table.index_select(0, positions).unbind(1)
    return cos, sin
