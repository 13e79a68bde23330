"""Products with weight matrices, in the memory layout that the processor reads fastest."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.quantized_tensor import plain

# A weight up to this size is kept in its plain layout as well: a product with it takes less time than oneDNN
# takes to begin one.
SMALL_BYTES = 4 << 20
# Row counts up to the first number are padded to multiples of the second.
ROW_BUCKETS = ((8, 1), (32, 4), (64, 8), (256, 32), (1024, 64))
LARGEST_MULTIPLE = 128


def onednn_multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN computes the matrix products of this dtype, which only some processors can."""
    return device.type == "cpu" and dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn_packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether weights of this dtype are rearranged for oneDNN."""
    if dtype == torch.float32:
        return device.type == "cpu" and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return onednn_multiplies(dtype, device)


def is_bfloat16_fast(device: torch.device) -> bool:
    """Return whether the device has instructions for bfloat16; other processors are faster in float32."""
    if device.type == "cuda":
        # Torch's own answer counts emulation, and is about the current device.
        return bool(torch.cuda.get_device_properties(device).major >= 8)
    return onednn_multiplies(torch.bfloat16, device) and torch.cpu._is_avx512_bf16_supported()


class Projection:
    """A product in plain torch.

    On a CPU, in bfloat16 and float32, oneDNN rearranges a plain weight at every product of several rows, which costs
    as much as the product; here that is done once. A single row by a small weight does without oneDNN.

    Args:
        weight: `[out_features, in_features]`.
        bias: `[out_features]` or None.

    Attributes:
        is_small: whether products of one row read `weight` itself.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = plain(weight)
        self.weight, self.bias, self.size = weight, bias, weight.shape[0]
        self._packed: Tensor | None = None
        self.is_small = 0 < weight.nbytes <= SMALL_BYTES
        if onednn_packs(weight.dtype, weight.device):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    @property
    def keeps_weight(self) -> bool:
        return self._packed is None or self.is_small

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: `[rows, in_features]` to `[rows, out_features]`."""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        if self.is_small and x.shape[0] == 1:
            return _without_onednn(x, self.weight, self.bias)
        rows = x.shape[0]
        padding = padded_rows(rows) - rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self.bias, "none", [], "")
        return product[:rows] if padding else product


def padded_rows(rows: int) -> int:
    """Return the row count to which `rows` rows are padded.

    oneDNN compiles a kernel for every row count that it meets, which takes as long as the first product of
    hundreds of rows, and batches of trees and prompts have all kinds of them. So only few counts are used beyond the
    smallest.
    """
    for most, multiple in ROW_BUCKETS:
        if rows <= most:
            return ceil_div(rows, multiple) * multiple
    return ceil_div(rows, LARGEST_MULTIPLE) * LARGEST_MULTIPLE


def pad_rows(x: Tensor) -> Tensor:
    """Append rows of zeros to `x` `[rows, …]` up to `padded_rows`, if oneDNN computes its products."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    if not onednn_multiplies(dtype, x.device):
        return x
    return F.pad(x, (0, 0, 0, padded_rows(len(x)) - len(x)))


def _without_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    onednn.enabled = False
    try:
        return F.linear(x, weight, bias)
    finally:
        onednn.enabled = before
