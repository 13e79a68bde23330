"""Comparisons of batches of draft trees in their two forms."""

from collections.abc import Sequence

import torch

from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.kernels.types.upload import Packet
from specdec.verify.tree_batch import TreeBatch

CPU = torch.device("cpu")


def assert_nodes_equal(mine: DraftTrees, other: DraftTrees) -> None:
    for own, wanted in zip(mine.nodes(Packet(CPU))(), other.nodes(Packet(CPU))(), strict=True):
        words = min(own.shape[-1], wanted.shape[-1]) if own.ndim == 2 else None
        assert torch.equal(own if words is None else own[:, :words], wanted if words is None else wanted[:, :words])


def assert_read_equal(mine: Sequence[DraftTree], other: Sequence[DraftTree]) -> None:
    assert list(mine) == list(other)
    for own, wanted in zip(mine, other, strict=True):
        assert (own.ranks, own.depths, own.ancestors) == (wanted.ranks, wanted.depths, wanted.ancestors)


def assert_packed_equal(mine: DraftTrees, other: DraftTrees) -> None:
    """Compare them packed as rows of a step, before the row of a request without drafts."""
    parts = [TreeRow([3, 4], 5, list(range(40)), 1)] * (1 + len(mine.sizes))
    own, wanted = (TreeBatch.pack(parts, trees, 4, CPU) for trees in (mine, other))
    for name in ("tokens", "positions", "slots"):
        assert torch.equal(getattr(own, name), getattr(wanted, name))
    rows = torch.arange(len(own.tokens))
    assert torch.equal(own.scored(rows), wanted.scored(rows))
    assert torch.equal(own.rows.ancestors, wanted.rows.ancestors)
