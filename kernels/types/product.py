"""The interface of products with a weight matrix."""

from typing import Protocol

from torch import Tensor


class Product(Protocol):
    """`x @ weight.T + bias`, in the form that a kernel set reads fastest.

    Attributes:
        weight: `[out_features, in_features]` as it was given.
        size: out_features.
        keeps_weight: whether products read `weight` itself, now and then at least.
    """

    weight: Tensor
    bias: Tensor | None
    size: int

    @property
    def keeps_weight(self) -> bool: ...

    def __call__(self, x: Tensor, /) -> Tensor:
        """Multiply: `[rows, in_features]` to `[rows, out_features]`."""
        ...
