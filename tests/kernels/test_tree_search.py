"""The search's kernels against their references: frontiers, the best nodes of all levels, and ancestors as bits."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.reference import tree_search as reference
from specdec.kernels.types.tree_search import Frontier, SearchedLevels
from specdec.kernels.types.types import TopK
from tests.kernels.kernel_checks import DEVICE, poisoned_outputs

tree_search = pytest.importorskip("specdec.kernels.triton.tree_search")

seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_outputs("tree_search"):
        yield


def scores_of(seed: int, rows: int, count: int, ties: bool) -> Tensor:
    """Return log-probabilities; with ties, few values, -inf and NaN among them. No path is likelier than its begin."""
    generator = torch.Generator().manual_seed(seed)
    if not ties:
        return -torch.rand(rows, count, generator=generator)
    some = torch.tensor([0.0, -1.0, -math.inf, math.nan])
    return some[torch.randint(4, (rows, count), generator=generator)]


def own_bits(width: int, words: int, level: int) -> Tensor:
    """Return a bit for each node of a level, the last of a word among them."""
    bits = torch.zeros(width, words, dtype=torch.int64)
    for node in range(width):
        place = (level * width + node) * 7 % (64 * words)
        bits[node, place // 64] = (1 << place % 64) - (1 << 64 if place % 64 == 63 else 0)
    return bits


def searched(seed: int, rows: int, width: int, depth: int, ties: bool, words: int) -> SearchedLevels:
    """Run a search with both, compare each level, and return all levels without bounds."""
    generator = torch.Generator().manual_seed(seed)
    above: Frontier | None = None
    levels = []
    for level in range(depth):
        nodes = rows if above is None else rows * width
        tokens = torch.randint(1000, (nodes, width), generator=generator)
        sums = torch.rand(nodes, generator=generator) if not ties else torch.zeros(nodes)
        children = TopK(tokens, scores_of(seed + level, nodes, width, ties), sums)
        own = own_bits(width, words, level) if words else None
        expected = reference.next_frontier(children, above, own, rows, width)
        given = [None if part is None else part.to(DEVICE) for part in (*children, *(above or ()), own)]
        there = None if above is None else Frontier(*given[3:7])  # type: ignore[arg-type]
        found = tree_search.next_frontier(TopK(*given[:3]), there, given[-1], rows, width)
        for mine, theirs in zip((*found[:3], *found.frontier), (*expected[:3], *expected.frontier), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine.cpu(), theirs)
        levels.append(expected)
        above = expected.frontier
    best = torch.stack([level.best for level in levels[:-1]], 1) if depth > 1 else torch.empty(rows, 0, width).long()
    values, tokens = (torch.cat([level[part] for level in levels], 1) for part in range(2))
    return SearchedLevels(values, tokens, best, torch.empty(0), torch.empty(0))


@pytest.mark.long
@given(
    seeds, st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.booleans(), st.sampled_from([0, 1, 2]), st.data()
)
def test_frontiers_and_nodes_are_the_references(
    seed: int, rows: int, width: int, depth: int, ties: bool, words: int, data: st.DataObject
) -> None:
    levels = searched(seed, rows, width, depth, ties, words)
    count = levels.values.shape[1]
    ends = [0, *(width + level * width**2 for level in range(depth))]
    reach = data.draw(st.lists(st.sampled_from(ends), min_size=rows, max_size=rows))
    most = data.draw(st.integers(1, count))
    counts = [data.draw(st.integers(0, min(most, within))) for within in reach]
    levels = levels._replace(counts=torch.tensor(counts), reach=torch.tensor(reach))
    expected = reference.best_nodes(levels, most, width)
    on_device = SearchedLevels(*(part.to(DEVICE) for part in levels))
    found = tree_search.best_nodes(on_device, most, width)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.long
@pytest.mark.parametrize(("width", "depth", "most"), [(10, 6, 60), (10, 6, 150), (16, 4, 64)])
def test_large_trees(width: int, depth: int, most: int) -> None:
    """Of several words of bits, and of as many candidates as the official settings have."""
    levels = searched(3, 2, width, depth, False, 1)
    count = levels.values.shape[1]
    levels = levels._replace(counts=torch.tensor([most, most - 1]), reach=torch.tensor([count, count]))
    expected = reference.best_nodes(levels, most, width)
    found = tree_search.best_nodes(SearchedLevels(*(part.to(DEVICE) for part in levels)), most, width)
    assert torch.equal(found.cpu(), expected)


def test_a_frontier_has_no_more_nodes_than_candidates() -> None:
    children = TopK(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2), torch.zeros(1))
    with pytest.raises(ValueError, match="width is 3; a row has 2 candidates"):
        tree_search.next_frontier(children, None, None, 1, 3)
