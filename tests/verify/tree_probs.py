"""Draft probabilities of one tree of a batch."""

import torch
from torch import Tensor

from specdec.kernels.types.device_trees import NO_PROBS
from specdec.kernels.types.draft_trees import DraftTrees


def probs_of(trees: DraftTrees, row: int) -> Tensor:
    """Return `[1 + nodes, vocab]`: the distributions that the children of a row's root and nodes were drawn from."""
    table, rows = trees.select([row]).draft_probs(torch.device("cpu"))
    return table[rows].masked_fill(rows[:, None] == NO_PROBS, 0)
