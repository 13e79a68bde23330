"""Trees left on the device are those that the host would have made, and are read all at once."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.tree_draw import TreeDraw
from specdec.verify.grown_trees import GrownTree, grown_together, joined, node_tensors
from specdec.verify.tree import ROOT, DraftTree
from tests.draft_heads.drawn_levels import Head, draw_with
from tests.draft_heads.searched_levels import bounds, coarse_head, random_head, search_with
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


def living(tree: DraftTree) -> DraftTree:
    """The tree without what its laws cannot have drawn."""
    table = tree.draft_probs
    assert table is not None
    place = {ROOT: ROOT}
    for node, parent in enumerate(tree.parents):
        if parent in place and table[1 + parent, tree.tokens[node]] > 0:
            place[node] = len(place) - 1
    kept = [node for node in place if node != ROOT]
    tokens, parents = (tuple(part[node] for node in kept) for part in (tree.tokens, tree.parents))
    return DraftTree(tokens, tuple(place[parent] for parent in parents), table[[0, *(1 + node for node in kept)]])


@given(
    draft_shapes(4, 5),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=3),
    seeds,
    st.booleans(),
)
def test_drawn_trees_are_those_of_the_host(
    shape: DraftShape, bounds: list[tuple[int, int]], seed: int, zeros: bool
) -> None:
    """But for nodes that nothing could be drawn for, which stay, so that the number of all is known."""
    draw = draw_with([Head(seed, row, zeros) for row in range(len(bounds))], shape, [0] * shape.depth).draw
    budgets, depths = [b for b, _ in bounds], [d for _, d in bounds]
    wanted, grown = draw.trees(budgets, depths), draw.grown(budgets, depths)
    for mine, other, budget in zip(grown, wanted, budgets, strict=True):
        assert len(other) <= len(mine) <= budget
        assert zeros or len(other) == len(mine)
        if len(mine):
            assert isinstance(mine, GrownTree)
            left = living(mine)
            assert left == other
            assert mine.depths == tuple(mine.batch.nodes([mine.row]).depths.tolist())
            same = DraftTree(mine.tokens, mine.parents).path_tokens
            paths = mine.paths_on(torch.device("cpu"))
            assert (paths[:, : same.shape[1]].numpy() == same).all()
            assert (paths[:, same.shape[1] :] == -1).all()
            assert mine.ranks == tuple(range(len(mine)))
            assert left.draft_probs is not None
            assert other.draft_probs is not None
            for node in (ROOT, *other.children_of):
                assert torch.equal(left.draft_probs[1 + node], other.draft_probs[1 + node])


@given(seeds, st.permutations(range(5)), st.booleans())
def test_batches_become_one(seed: int, order: list[int], both_drawn: bool) -> None:
    """Of another width, another number of words, and drawn or not; among them a row without a tree."""

    def drawing(rows: tuple[int, ...], shape: DraftShape) -> TreeDraw:
        return draw_with([Head(seed, row, False) for row in rows], shape, [0] * shape.depth).draw

    drawn = drawing((0, 1), DraftShape(3, 3, 9)).grown([9, 4], [3, 3])
    if both_drawn:
        others = drawing((2, 3), DraftShape(2, 4, 8)).grown([3, 8], [2, 2])
    else:
        search, _ = search_with([random_head(seed, row) for row in (0, 1)], DraftShape(6, 8, 70))
        others = search.grown([70, 66], [6, 6])
    trees = [[*drawn, *others, DraftTree()][place] for place in order]
    whole = joined(trees)
    together = grown_together(whole)
    assert together is not None
    assert together[1] == [tree.row for tree in whole if isinstance(tree, GrownTree)]
    for mine, other in zip(whole, trees, strict=True):
        assert mine == other
        assert (mine.ranks, mine.depths, mine.ancestors) == (other.ranks, other.depths, other.ancestors)
        assert mine.is_drawn == other.is_drawn
        if other.draft_probs is not None:
            assert mine.draft_probs is not None
            assert torch.equal(mine.draft_probs, other.draft_probs)
    for mine, other in zip(node_tensors(whole, CPU), node_tensors(trees, CPU), strict=True):
        assert torch.equal(mine[:, : other.shape[1]], other) if mine.ndim == 2 else torch.equal(mine, other)
    assert joined(whole) == whole
    assert joined(drawn)[0] is drawn[0]
    assert joined([*trees, DraftTree.chain([1])])[order.index(0)] is drawn[0]
