"""Drawn output matrices, with states to be scored."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.kernels.reference.projection import Projection
from tests.strategies import seeds


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def readout_of(seed: int, vocab: int, width: int, most: int | None, states: int) -> tuple[MatrixReadout, Tensor]:
    """Return a matrix of all tokens or of at most so many, and states to be scored."""
    tokens = None
    if most is not None:
        tokens = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:most]
    weight = drawn(seed, vocab if tokens is None else len(tokens), width)
    return MatrixReadout(Projection(weight), vocab, tokens), drawn(seed + 1, states, width)


# Built, so that a failure prints the call.
readouts = st.builds(
    readout_of,
    seed=seeds,
    vocab=st.integers(8, 90),
    width=st.integers(1, 12),
    most=st.none() | st.integers(1, 90),
    states=st.integers(1, 4),
)
