"""Linear layers for training and serving, and how modules give up weights that their forms have laid out anew."""

from typing import cast

import torch
from torch import Tensor, nn

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.reference.projection import pad_rows
from specdec.kernels.types.product import Product


class Linear(nn.Linear):
    """Linear layer.

    As most modules of a draft head or a target it has `form(kernels)`, how it is called: in training, where there are
    no kernels, over the modules themselves; in serving by a plain function or object over the kernels of a device.
    That skips the module machinery, which at one row a step costs as much as the arithmetic.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: `[rows, in_features]` to `[rows, out_features]`."""
        return super().forward(pad_rows(x))[: len(x)]

    def form(self, kernels: KernelSet | None) -> Product:
        """Take the weights as final. Large ones laid out anew are not kept in their old layout as well."""
        if kernels is None:
            # Training calls it, and asks for nothing else.
            return cast("Product", self)
        product = kernels.projection(self.weight, self.bias)
        if not product.keeps_weight:
            product.weight = self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
        elif product.weight is not self.weight:
            self.weight = nn.Parameter(product.weight, requires_grad=False)
        return product


def give_up(*parts: nn.Module | None) -> None:
    """Free the weights of modules whose form has them in a layout of its own."""
    for module in (module for part in parts if part is not None for module in part.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            nothing = torch.empty(0, dtype=weight.dtype, device=weight.device)
            setattr(module, name, nn.Parameter(nothing, requires_grad=False))
