"""RMS norm and gated activation in plain torch: what a CPU runs, and the reference of the Triton kernels."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.types.types import HeadNorms

# 2^7 + 1: seven of float64's 53 bits are dropped.
SPLITTER = 129.0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last dimension (Zhang & Sennrich 2019).

    Computed as the layer norm of `[x, -x]`, which has mean 0 and the mean square of x as its variance: one
    fused operation, where torch's own RMS norm is nine on a CPU.

    In float64 the normalisation itself runs in float32, as in transformers, so that a float64 run can be
    compared with it digit for digit. Numbers half way between two of float32's, which sums of few bits can give, are
    rounded alike here, whatever the order of the sum; there it depends on the sum's error.
    """
    if x.dtype != torch.float64:
        size = x.shape[-1]
        normed = F.layer_norm(torch.cat([x, -x], -1), (2 * size,), None, None, eps)
        return normed[..., :size] * weight
    single = _rounded(x)
    single = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)
    return weight * single.to(x.dtype)


def _rounded(x: Tensor) -> Tensor:
    """Round float64 to float32 by way of 46 bits, so that errors of the last bits do not decide (Veltkamp 1968)."""
    scaled = x * SPLITTER
    return (scaled - (scaled - x)).float()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the `rms_norm` of `residual + x`, and that sum."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def norm_heads(qkv: Tensor, norms: HeadNorms, num_heads: int) -> None:
    """Apply `rms_norm` to each query and key of `[rows, num_heads + 2 * kv_heads, head_dim]` in place."""
    end = (num_heads + qkv.shape[1]) // 2
    for part, weight in ((qkv[:, :num_heads], norms.query), (qkv[:, num_heads:end], norms.key)):
        part.copy_(rms_norm(part.reshape(-1, part.shape[-1]), weight, norms.eps).view_as(part))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` for `gate_up = [rows, 2 * intermediate]`."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up.split_with_sizes((size, size), -1)
    return F.silu(gate) * up
