"""RMS norm: its weights, and its form for a kernel set."""

import torch
from torch import Tensor, nn

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.reference.elementwise import add_rms_norm, rms_norm
from specdec.kernels.types.types import HeadNorms


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of `residual + x`, and the sum itself."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def form(self, kernels: KernelSet | None) -> "Norm":
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


# A norm as it is called.
Norm = RMSNorm | ServedRMSNorm


def head_norms(query: RMSNorm, key: RMSNorm, kernels: KernelSet | None) -> HeadNorms:
    """Return the norms of queries and keys; see `Linear`."""
    weights = (query.weight, key.weight) if kernels is None else (query.weight.detach(), key.weight.detach())
    return HeadNorms(*weights, query.eps)
