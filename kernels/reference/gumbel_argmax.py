"""Argmax of scores with noise in plain torch: the reference of the Triton kernel."""

import torch
from torch import Tensor

from specdec.kernels.reference.philox import gumbel_noise
from specdec.kernels.types.types import NO_TOKEN, NoiseColumns


def gumbel_argmax(scores: Tensor, noise: NoiseColumns) -> Tensor:
    """See `specdec.kernels.triton.gumbel_argmax`."""
    values, tokens = perturbed(scores, noise, 0, 0).max(-1)
    return tokens.masked_fill_(~values.isfinite(), NO_TOKEN)


def perturbed(scores: Tensor, noise: NoiseColumns, stream: int, lane: int, tokens: Tensor | None = None) -> Tensor:
    """Return scores plus noise, a new tensor `[rows, n]`: float32, float64 for float64 scores.

    Args:
        tokens: `[n]`, which tokens are scored; None for all.
    """
    size = scores.shape[1] if tokens is None else int(tokens.max()) + 1
    addends = gumbel_noise(*noise[:3], size, stream, lane)
    if tokens is not None:
        addends = addends[:, tokens]
    exact = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.to(exact) + addends.masked_fill_(~noise.sampled[:, None], 0)
