"""Trees left on the device are those that the host would have made, and are read all at once."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.tree_draw import TreeDraw
from specdec.kernels.types.device_trees import DeviceTrees
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import NoiseKey
from specdec.kernels.types.upload import Packet
from tests.draft_heads.drawn_levels import Head, draw_with
from tests.draft_heads.searched_levels import bounds, coarse_head, device_trees_of, random_head, search_with
from tests.draft_heads.tree_equality import assert_nodes_equal, assert_packed_equal, assert_read_equal
from tests.strategies import draft_shapes, seeds
from tests.verify.tree_probs import probs_of

CPU = torch.device("cpu")


@given(draft_shapes(4, 5), bounds, seeds, st.sampled_from([random_head, partial(coarse_head, least=-9.0)]))
def test_they_are_the_trees_of_the_host(
    shape: DraftShape,
    bounds: list[tuple[int, int]],
    seed: int,
    make: Callable[[int, int], Callable[[tuple[int, ...]], Tensor]],
) -> None:
    """Where no node is impossible; the host leaves such nodes out."""
    search, _ = search_with([make(seed, row) for row in range(len(bounds))], shape)
    budgets, depths = [b for b, _ in bounds], [d for _, d in bounds]
    wanted, grown = search.host_trees(budgets, depths), device_trees_of(search, budgets, depths)
    assert grown.sizes == wanted.sizes
    assert grown.is_drawn == wanted.is_drawn
    assert grown.depth >= wanted.depth
    assert_nodes_equal(grown, wanted)
    assert_packed_equal(grown, wanted)
    keys = [NoiseKey(seed, row, 7) if row % 2 else None for row in range(len(bounds))]
    mine, other = (trees.noise(keys, Packet(CPU))().columns(CPU) for trees in (grown, wanted))
    for own, expected in zip(mine, other, strict=True):
        assert torch.equal(own * other.sampled, expected)
    assert grown.batch.host is None
    assert_read_equal(grown.read(), wanted.read())


def test_128_nodes_take_two_words() -> None:
    shape = DraftShape(6, 8, 128)
    search, _ = search_with([random_head(0, 0), random_head(0, 1)], shape)
    wanted, grown = search.host_trees([128, 70], [6, 6]), device_trees_of(search, [128, 70], [6, 6])
    assert grown.sizes == [128, 70]
    for mine, other in zip(grown.nodes(Packet(CPU))(), wanted.nodes(Packet(CPU))(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("first", [lambda t: t.read(), lambda t: t.select([1]).read(), lambda t: t.begin_read([])()])
def test_one_transfer_reads_all(first: Callable[[DeviceTrees], object], monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = search_with([random_head(1, 0), random_head(1, 1)], DraftShape(3, 2, 6))
    grown = device_trees_of(search, [6, 4], [3, 3])
    assert sum(grown.sizes) == 10
    assert grown.batch.host is None
    first(grown)
    assert grown.batch.host is not None
    monkeypatch.setattr("specdec.kernels.types.device_trees.Download", lambda _: pytest.fail("read once more"))
    assert_read_equal(grown.read(), search.host_trees([6, 4], [3, 3]).read())


def test_numbers_and_trees_come_in_one_transfer() -> None:
    search, _ = search_with([random_head(1, 0), random_head(1, 1)], DraftShape(3, 2, 6))
    parts = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([5]), torch.empty(0, dtype=torch.int64)]
    for trees in (device_trees_of(search, [6, 4], [3, 3]), search.host_trees([6, 4], [3, 3])):
        assert trees.begin_read(parts)() == [[1, 2, 3, 4], [5], []]
        assert trees.begin_read(parts)() == [[1, 2, 3, 4], [5], []]
    assert device_trees_of(search, [6, 4], [3, 3]).select([None]).begin_read(parts[1:2])() == [[5]]


def living(tree: DraftTree, table: Tensor) -> tuple[DraftTree, Tensor]:
    """The tree without what its distributions cannot have drawn, and these."""
    place = {ROOT: ROOT}
    for node, parent in enumerate(tree.parents):
        if parent in place and table[1 + parent, tree.tokens[node]] > 0:
            place[node] = len(place) - 1
    kept = [node for node in place if node != ROOT]
    tokens, parents = (tuple(part[node] for node in kept) for part in (tree.tokens, tree.parents))
    left = DraftTree(tokens, tuple(place[parent] for parent in parents))
    return left, table[[0, *(1 + node for node in kept)]]


@given(
    draft_shapes(4, 5),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=3),
    st.integers(0, 2),
    seeds,
    st.booleans(),
)
def test_drawn_trees_are_those_of_the_host(
    shape: DraftShape, bounds: list[tuple[int, int]], padding: int, seed: int, zeros: bool
) -> None:
    """But for nodes that nothing could be drawn for, which stay, so that the number of all is known."""
    rows = range(len(bounds) + padding)
    draw = draw_with([Head(seed, row, zeros) for row in rows], shape, [0] * shape.depth).draw
    budgets, depths = [b for b, _ in bounds], [d for _, d in bounds]
    wanted, grown = draw.host_trees(budgets, depths), draw.device_trees(budgets, depths)
    for row, (mine, other, budget) in enumerate(zip(grown.read(), wanted.read(), budgets, strict=True)):
        assert len(other) <= len(mine) <= budget
        assert zeros or len(other) == len(mine)
        assert grown.is_drawn[row] == (len(mine) > 0)
        if len(mine):
            left, table = living(mine, probs_of(grown, row))
            assert left == other
            assert mine.depths == tuple(grown.select([row]).nodes(Packet(CPU))().depths.tolist())
            same = torch.tensor(DraftTree(mine.tokens, mine.parents).path_tokens)
            paths = grown.paths(row, CPU)
            assert (paths[:, : same.shape[1]] == same).all()
            assert (paths[:, same.shape[1] :] == -1).all()
            assert mine.ranks == tuple(range(len(mine)))
            assert other.draft_probs is not None
            for node in (ROOT, *other.children_of):
                assert torch.equal(table[1 + node], other.draft_probs[1 + node])


@given(seeds, st.permutations([0, 1, 2, 3, None]), st.booleans())
def test_batches_become_one(seed: int, order: list[int | None], both_drawn: bool) -> None:
    """The batches differ in width, number of words, and whether they were drawn; one row has no tree."""

    def drawing(rows: tuple[int, ...], shape: DraftShape) -> TreeDraw:
        return draw_with([Head(seed, row, False) for row in rows], shape, [0] * shape.depth).draw

    drawn, others = drawing((0, 1), DraftShape(3, 3, 9)).device_trees([9, 4], [3, 3]), None
    if both_drawn:
        others = drawing((2, 3), DraftShape(2, 4, 8)).device_trees([3, 8], [2, 2])
    else:
        search, _ = search_with([random_head(seed, row) for row in (0, 1)], DraftShape(6, 8, 70))
        others = device_trees_of(search, [70, 66], [6, 6])
    whole = drawn.concat(others).select(order)
    apart = HostTrees([*drawn.read(), *others.read()]).select(order)
    assert whole.sizes == apart.sizes
    assert_nodes_equal(whole, apart)
    assert_packed_equal(whole, apart)
    assert_read_equal(whole.read(), apart.read())
    for place, row in enumerate(order):
        part, own = (others, row - 2) if row is not None and row > 1 else (drawn, row)
        assert whole.is_drawn[place] == (own is not None and part.is_drawn[own])
        if whole.is_drawn[place]:
            assert own is not None
            assert torch.equal(probs_of(whole, place), probs_of(part, own))
        if own is None:
            assert whole.paths(place, CPU).shape == (1, 0)
