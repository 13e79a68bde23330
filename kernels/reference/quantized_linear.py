"""Products with quantised weights in plain torch: the twin of `specdec.kernels.triton.quantized_linear`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.types.quantized_tensor import QuantizedRows


def quantized_linear(x: Tensor, weight: QuantizedRows, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, rounded once; see the Triton kernel. Also takes float64, which it computes in."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    product = F.linear(x.to(dtype), weight.dequantized().to(dtype), None if bias is None else bias.to(dtype))
    return product.to(x.dtype)
