"""Trees left on the device are those that the host would have made, and are read all at once."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.draft_shape import DraftShape
from specdec.verify.grown_trees import GrownTree, grown_together, node_tensors
from specdec.verify.tree import DraftTree
from tests.draft_heads.test_tree_search import bounds, coarse_head, random_head, search_with
from tests.strategies import draft_shapes, draft_trees, seeds

CPU = torch.device("cpu")


@given(draft_shapes(4, 5), bounds, seeds, st.sampled_from([random_head, coarse_head]))
def test_they_are_the_trees_of_the_host(
    shape: DraftShape,
    bounds: list[tuple[int, int]],
    seed: int,
    make: Callable[[int, int], Callable[[tuple[int, ...]], Tensor]],
) -> None:
    search, _ = search_with([make(seed, row) for row in range(len(bounds))], shape)
    budgets, depths = [b for b, _ in bounds], [d for _, d in bounds]
    wanted, grown = search.trees(budgets, depths), search.grown(budgets, depths)
    assert [len(tree) for tree in grown] == [len(tree) for tree in wanted]
    for mine, other in zip(node_tensors(grown, CPU), node_tensors(wanted, CPU), strict=True):
        words = min(mine.shape[-1], other.shape[-1]) if mine.ndim == 2 else None
        assert torch.equal(mine if words is None else mine[:, :words], other if words is None else other[:, :words])
    for mine, other in zip(grown, wanted, strict=True):
        assert not isinstance(mine, GrownTree) or mine.batch._host is None or len(mine)
        assert mine == other
        assert other == mine
        assert (mine.ranks, mine.depths, mine.ancestors) == (other.ranks, other.depths, other.ancestors)


def test_128_nodes_take_two_words() -> None:
    shape = DraftShape(6, 8, 128)
    search, _ = search_with([random_head(0, 0), random_head(0, 1)], shape)
    wanted, grown = search.trees([128, 70], [6, 6]), search.grown([128, 70], [6, 6])
    assert [len(tree) for tree in grown] == [128, 70]
    for mine, other in zip(node_tensors(grown, CPU), node_tensors(wanted, CPU), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("read", ["tokens", "parents", "ranks", "depths", "children"])
def test_whoever_asks_first_reads_all(read: str) -> None:
    search, _ = search_with([random_head(1, 0), random_head(1, 1)], DraftShape(3, 2, 6))
    first, second = search.grown([6, 4], [3, 3])
    assert isinstance(first, GrownTree)
    assert len(first) + len(second) == 10
    assert first.batch._host is None
    getattr(second, read)
    assert first.batch._host is not None


@given(st.lists(draft_trees(4, 12), min_size=1, max_size=3))
def test_trees_of_the_host_are_no_batch(trees: list[DraftTree]) -> None:
    assert grown_together(trees) is None
    search, _ = search_with([random_head(1, 0)], DraftShape(3, 2, 6))
    grown = search.grown([6], [3])
    assert (grown_together([*trees, *grown]) is None) == any(map(len, trees))
    assert node_tensors([*trees, *grown], CPU).tokens.tolist() == [t for tree in [*trees, *grown] for t in tree.tokens]
