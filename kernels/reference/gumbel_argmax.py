"""Argmax of scores with noise in plain torch: the reference of the Triton kernel."""

import torch
from torch import Tensor

from specdec.kernels.reference.noise import gumbel
from specdec.kernels.types.types import NO_TOKEN, NoiseColumns, NoiseKey, Stream


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
    found = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32, copy=True)
    for row, (*key, is_sampled) in enumerate(zip(*(part.tolist() for part in noise), strict=True)):
        if is_sampled:
            own = gumbel(*NoiseKey(*key), size, Stream(stream), lane).to(scores.device)
            found[row] += own if tokens is None else own[tokens]
    return found
