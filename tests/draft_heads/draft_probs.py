"""The distributions that drawn trees come from."""

import torch
from torch import Tensor

from specdec.verify.device_trees import NO_PROBS
from specdec.verify.draft_trees import DraftTrees


def probs_of(trees: DraftTrees, row: int) -> Tensor:
    """Return what the children of a row's root and nodes were drawn from, `[1 + nodes, vocab]`; 0 without children."""
    table, rows = trees.select([row]).draft_probs(torch.device("cpu"))
    return table[rows].masked_fill(rows[:, None] == NO_PROBS, 0)
