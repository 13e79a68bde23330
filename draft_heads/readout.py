"""From a head's states to scores of next tokens."""

from typing import Protocol

from torch import Tensor

from specdec.kernels.linear import Projection
from specdec.verify.sampler import Candidates


class Readout(Protocol):
    """Scores next tokens, all of them or those that are worth a look.

    Attributes:
        size: tokens scored of a row.
    """

    @property
    def size(self) -> int: ...

    def __call__(self, hidden: Tensor) -> Candidates:
        """Logits of `hidden`, `[rows, hidden_size]`."""
        ...


class MatrixReadout:
    """One product.

    Args:
        projection: to `[rows, size]`.
        vocab_size: the target's.
        tokens: int64 `[size]`, whom the rows of its matrix stand for; None for every token in order.
    """

    def __init__(self, projection: Projection, vocab_size: int, tokens: Tensor | None = None) -> None:
        self.projection, self.vocab_size, self.tokens = projection, vocab_size, tokens

    @property
    def size(self) -> int:
        return self.projection.weight.shape[0]

    def __call__(self, hidden: Tensor) -> Candidates:
        return Candidates(self.projection(hidden), self.vocab_size, self.tokens)
