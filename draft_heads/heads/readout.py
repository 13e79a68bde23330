"""Readouts: from a head's states to scores of all tokens, or of those of its own vocabulary."""

from typing import Protocol

from torch import Tensor

from specdec.kernels.types.product import Product
from specdec.kernels.types.types import Candidates


class Readout(Protocol):
    """Scores next tokens, all of them or those of a vocabulary of its own.

    Attributes:
        size: number of tokens scored per row.
        projection: the output matrix; a rank's part of it, where ranks share it.
        is_whole: whether the scores are those of `projection`.
        tokens: int64 `[size]`, the tokens scored; None for every token in order.
    """

    projection: Product
    is_whole: bool
    tokens: Tensor | None

    @property
    def size(self) -> int: ...

    def __call__(self, hidden: Tensor) -> Candidates:
        """Return the logits of states, `[rows, hidden_size]`."""
        ...


class MatrixReadout:
    """A readout by one matrix product.

    Args:
        projection: the output matrix, to `[rows, size]`.
        vocab_size: the target's vocabulary size.
        tokens: int64 `[size]`, the tokens of the matrix's rows; None for every token in order.
    """

    is_whole = True

    def __init__(self, projection: Product, vocab_size: int, tokens: Tensor | None = None) -> None:
        self.projection, self.vocab_size, self.tokens = projection, vocab_size, tokens

    @property
    def size(self) -> int:
        return self.projection.size

    def __call__(self, hidden: Tensor) -> Candidates:
        return Candidates(self.projection(hidden), self.vocab_size, self.tokens)
