"""The one time in a step that the host waits for a device: it reads the trees along with what became of them."""

from collections.abc import Sequence

import torch

from specdec.kernels.types import Acceptance, Walk
from specdec.verify.grown_trees import grown_together
from specdec.verify.tree import DraftTree


def read_walks(walks: Sequence[Walk], trees: Sequence[DraftTree]) -> list[Acceptance]:
    """The outcome of each row, walk after walk.

    Args:
        trees: all that were walked down, in any order; if they still are on the device they come in the same piece.
    """
    parts = [part.flatten() for walk in walks for part in (walk.lengths, walk.next_tokens, walk.paths)]
    together = grown_together(trees)
    if together is not None:
        parts.append(together[0].table.flatten())
    numbers: list[int] = torch.cat(parts).tolist()
    acceptances, start = list[Acceptance](), 0
    for walk in walks:
        rows, depth = walk.paths.shape
        lengths, next_tokens = numbers[start : start + rows], numbers[start + rows : start + 2 * rows]
        start += 2 * rows
        for length, token in zip(lengths, next_tokens, strict=True):
            acceptances.append(Acceptance(tuple(numbers[start : start + length]), token))
            start += depth
    if together is not None:
        together[0].learn(numbers[start:])
    return acceptances
