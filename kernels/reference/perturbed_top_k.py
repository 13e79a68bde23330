"""Top k of scores with noise in plain torch: the reference of the Triton kernel."""

import torch
from torch import Tensor

from specdec.kernels.reference.gumbel_argmax import perturbed
from specdec.kernels.types.types import NoiseColumns, TopK


def perturbed_top_k(
    scores: Tensor, noise: NoiseColumns, k: int, tokens: Tensor | None = None, stream: int = 0, lane: int = 0
) -> TopK:
    """See `specdec.kernels.triton.perturbed_top_k`."""
    if tokens is not None:
        # In order, so that of equal scores the lowest token comes first.
        tokens, order = tokens.sort()
        scores = scores[:, order]
    values = perturbed(scores, noise, stream, lane, tokens)
    values = values.masked_fill(values.isnan(), float("-inf"))
    best_values, best = values.sort(dim=-1, descending=True, stable=True)
    found = best[:, :k] if tokens is None else tokens[best[:, :k]]
    return TopK(found, best_values[:, :k], torch.logsumexp(values, -1))
