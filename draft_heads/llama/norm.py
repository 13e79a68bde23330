"""RMS norm: its weights, and its form for a kernel set."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.reference.elementwise import add_rms_norm, norm_heads, rms_norm


class Norm(Protocol):
    """`RMSNorm` as it is called."""

    weight: Tensor

    def __call__(self, x: Tensor, /) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of `residual + x`, and the sum itself."""
        ...


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `Norm`."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def form(self, kernels: KernelSet | None) -> Norm:
        """Return the norm by a device's kernels; see `Linear`."""
        return self if kernels is None else ServedRMSNorm(self.weight.detach(), self.eps, kernels)


class ServedRMSNorm:
    """`RMSNorm` by a device's kernels."""

    def __init__(self, weight: Tensor, eps: float, kernels: KernelSet) -> None:
        self.weight, self.eps, self.kernels = weight, eps, kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)


def head_norms(query: RMSNorm, key: RMSNorm, num_heads: int, kernels: KernelSet | None) -> Callable[[Tensor], None]:
    """Return what norms queries and keys of `[rows, num_heads + 2 * kv_heads, head_dim]` in place; see `Linear`."""
    if kernels is None:
        return lambda qkv: norm_heads(qkv, query.weight, key.weight, query.eps, num_heads)
    weights = query.weight.detach(), key.weight.detach()
    return lambda qkv: kernels.norm_heads(qkv, *weights, query.eps, num_heads)
