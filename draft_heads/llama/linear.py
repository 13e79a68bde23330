"""Linear layers for training and serving, and how a module's parts take their form for serving."""

from torch import Tensor, nn

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.reference.projection import pad_rows
from specdec.kernels.types.product import Product


class Linear(nn.Linear):
    """Linear layer whose inference form is a `Product`."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: `[rows, in_features]` to `[rows, out_features]`."""
        return super().forward(pad_rows(x))[: len(x)]

    def inference_form(self, kernels: KernelSet) -> Product:
        """Take the weights as final. Large ones laid out anew are not kept in their old layout as well."""
        product = kernels.projection(self.weight, self.bias)
        if not product.keeps_weight:
            product.weight = self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
        elif product.weight is not self.weight:
            self.weight = nn.Parameter(product.weight, requires_grad=False)
        return product


def prepare_for_inference(module: nn.Module, kernels: KernelSet) -> None:
    """Have a module's parts run by a device's kernels from now on.

    A module with `prepare(kernels)` that returns True has prepared all its parts. Otherwise every part that has an
    `inference_form(kernels)` is called in that form: an instance's own attribute goes before `nn.Module`'s search for a
    submodule, so the form hides the part that it came from, and its calls skip the module machinery, which at one row a
    step costs as much as the arithmetic.
    """
    prepare = getattr(module, "prepare", None)
    if prepare is not None and prepare(kernels):
        return
    for name, part in module.named_children():
        inference_form = getattr(part, "inference_form", None)
        if inference_form is None:
            prepare_for_inference(part, kernels)
            continue
        assert name.isidentifier(), f"part {name} of a list is not called as an attribute"
        module.__dict__[name] = inference_form(kernels)
