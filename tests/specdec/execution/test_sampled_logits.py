"""Logits that are verified: a part of a step's, or all of them as they are."""

from types import SimpleNamespace
from typing import Any

import torch

from specdec.execution.worker import _sampled_logits
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import DraftTree


def order(scored: list[int], sampled: list[int]) -> Any:
    return SimpleNamespace(parts=[SimpleNamespace(num_scored=count) for count in scored], sampled=sampled)


def test_logits_of_sampled_rows_alone_are_not_copied() -> None:
    """Nor where parts of prompts, which have no logits, are read beside them."""
    trees, logits = HostTrees([DraftTree(), DraftTree((5, 6), (-1, 0)), DraftTree()]), torch.randn(4, 3)
    assert _sampled_logits(order([0, 1, 1], [1, 2]), trees, logits) is logits
    assert _sampled_logits(order([1, 1, 1], [0, 1, 2]), trees, wide := torch.randn(5, 3)) is wide


def test_other_rows_are_left_out() -> None:
    """Scored tokens of prompts, and rows that are scored and not sampled."""
    trees, logits = HostTrees([DraftTree(), DraftTree((5, 6), (-1, 0)), DraftTree()]), torch.randn(7, 3)
    found = _sampled_logits(order([3, 1, 1], [0, 1]), trees, logits)
    assert torch.equal(found, logits[2:6])
