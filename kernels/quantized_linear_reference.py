"""Products with quantised weights in plain torch: the twin of `specdec.kernels.quantized_linear`."""

from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.quantized_tensor import QuantizedRows


def quantized_linear(x: Tensor, weight: QuantizedRows, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, rounded once; see the Triton kernel."""
    product = F.linear(x.float(), weight.dequantized(), None if bias is None else bias.float())
    return product.to(x.dtype)
