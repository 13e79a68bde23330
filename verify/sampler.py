"""Argmax and top k of scores with each row's own noise, by a device's means."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.kernels.kernel_set import KernelSet
from specdec.verify.noise import GumbelNoise

# What is emitted where no token can be: the row's logits are not finite, or every token is forbidden.
NO_TOKEN = -1


class NoiseKey(NamedTuple):
    """Whose noise, and of which output position (0 is the first generated token)."""

    seed: int
    sample_index: int
    position: int


class Children(NamedTuple):
    """The likeliest next tokens of each row, best first.

    Attributes:
        tokens: int64 `[rows, k]`.
        log_chances: `[rows, k]`: that each is the argmax of the perturbed scores; NaN or -inf where nothing can come.
    """

    tokens: Tensor
    log_chances: Tensor


class Sampler(Protocol):
    """Gumbel-max sampling: the argmax of scores plus noise is a draw from their softmax."""

    def argmax(self, scores: Tensor, keys: Sequence[NoiseKey | None]) -> Tensor:
        """int64 `[rows]`: lowest id on ties, `NO_TOKEN` where the largest is no finite number.

        Args:
            scores: `[rows, vocab]`, processed logits; not to be used afterwards where a row has a key.
            keys: of each row's noise, None for no noise.
        """
        ...

    def top_k(self, scores: Tensor, keys: Sequence[NoiseKey | None], k: int) -> Children:
        """The `k` largest of each row; arguments as for `argmax`."""
        ...


def argmax(scores: Tensor) -> Tensor:
    """int64 `[rows]`, the lowest id on ties, `NO_TOKEN` where the largest is no finite number.

    Below float32, torch's own argmax takes several times as long as its max.
    """
    values, tokens = scores.max(-1)
    return tokens.masked_fill_(~values.isfinite(), NO_TOKEN)


class TorchSampler:
    """In plain torch, with noise that is kept for whoever asks for the same position next."""

    def __init__(self, noise: GumbelNoise) -> None:
        self.noise = noise

    def argmax(self, scores: Tensor, keys: Sequence[NoiseKey | None]) -> Tensor:
        return argmax(self._perturb_(scores, keys))

    def top_k(self, scores: Tensor, keys: Sequence[NoiseKey | None], k: int) -> Children:
        values, tokens = self._perturb_(scores, keys).topk(k)
        return Children(tokens, values - scores.logsumexp(-1, keepdim=True))

    def _perturb_(self, scores: Tensor, keys: Sequence[NoiseKey | None]) -> Tensor:
        for row, key in enumerate(keys):
            if key is not None:
                scores[row] += self.noise.at(*key)
        return scores


class KernelSampler:
    """By kernels that make the same noise where they need it."""

    def __init__(self, kernels: KernelSet) -> None:
        self.kernels = kernels

    def argmax(self, scores: Tensor, keys: Sequence[NoiseKey | None]) -> Tensor:
        return self.kernels.gumbel_argmax(scores, *_columns(keys, scores.device))

    def top_k(self, scores: Tensor, keys: Sequence[NoiseKey | None], k: int) -> Children:
        found = self.kernels.perturbed_top_k(scores, *_columns(keys, scores.device), k)
        return Children(found.tokens, found.scores - found.log_sum_exp[:, None])


def _columns(keys: Sequence[NoiseKey | None], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Seeds, sample indices and positions, int64 `[rows]`, and which rows have any."""
    known = torch.tensor([key or (0, 0, 0) for key in keys], dtype=torch.int64).view(-1, 3).T.contiguous().to(device)
    sampled = torch.tensor([key is not None for key in keys], dtype=torch.bool).to(device)
    return known[0], known[1], known[2], sampled
