"""The readout: from a head's states to scores of all tokens, or of those of its own vocabulary."""

from collections.abc import Callable

from torch import Tensor

from specdec.kernels.types.product import Product
from specdec.kernels.types.types import Candidates


class MatrixReadout:
    """Scores next tokens by one matrix product.

    Args:
        projection: the output matrix; a rank's rows of it, where ranks share it.
        vocab_size: the target's vocabulary size.
        tokens: int64 `[size]`, the tokens of the whole matrix's rows; None for every token in order.
        gather: returns the scores of all ranks' rows, `[rows, size]`; None if `projection` is the whole matrix.
            Gathering all of them is exact for whatever follows: filters, edits, noise, drawn drafts. The best tokens
            and the log-sum-exp of each rank would be fewer bytes, but serve plain search alone.
    """

    def __init__(
        self,
        projection: Product,
        vocab_size: int,
        tokens: Tensor | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.projection, self.vocab_size, self.tokens, self.gather = projection, vocab_size, tokens, gather

    @property
    def is_whole(self) -> bool:
        """True if `projection` is the whole output matrix, not a rank's rows of it."""
        return self.gather is None

    @property
    def size(self) -> int:
        """Number of tokens scored per row."""
        return self.vocab_size if self.tokens is None else len(self.tokens)

    def __call__(self, hidden: Tensor) -> Candidates:
        """Return the logits of states, `[rows, hidden_size]`; with `gather` the same on all ranks."""
        scores = self.projection(hidden)
        return Candidates(scores if self.gather is None else self.gather(scores), self.vocab_size, self.tokens)
