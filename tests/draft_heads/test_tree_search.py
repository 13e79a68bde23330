"""TreeSearch against EAGLE-2 in plain Python."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.types.tree import DraftTree
from tests.draft_heads.searched_levels import VOCAB, Head, Path, bounds, coarse_head, random_head, search_with
from tests.strategies import draft_shapes, seeds
from tests.trees import chain_of, path_to


def value(head: Head, path: Path) -> np.float32:
    """Sum of float32 log-probabilities, from the root down."""
    total = np.float32(0)
    for depth, token in enumerate(path):
        total = np.float32(total + np.float32(head(path[:depth])[token].item()))
    return total


def naive_tree(head: Head, shape: DraftShape, budget: int, max_depth: int) -> set[Path]:
    """EAGLE-2: expand the best of each level, then keep the best of all candidates."""
    frontier: list[Path] = [()]
    candidates: list[Path] = []
    for depth in range(1, shape.depth + 1):
        level: list[Path] = []
        for path in frontier:
            children = sorted(range(VOCAB), key=lambda token, path=path: -head(path)[token].item())
            level += [(*path, token) for token in children[: shape.branching]]
        level.sort(key=lambda path: -value(head, path))
        if depth <= max_depth:
            candidates += level
        frontier = level[: shape.branching]
    return set(sorted(candidates, key=lambda path: (-value(head, path), len(path)))[:budget])


def paths_of(tree: DraftTree) -> list[Path]:
    return [tuple(tree.tokens[above] for above in path_to(tree, node)) for node in range(len(tree))]


@given(draft_shapes(4, 5), bounds, seeds)
def test_trees_equal_naive_eagle2(shape: DraftShape, bounds: list[tuple[int, int]], seed: int) -> None:
    heads = [random_head(seed, row) for row in range(len(bounds))]
    search, _ = search_with(heads, shape)
    trees = search.host_trees([b for b, _ in bounds], [d for _, d in bounds]).read()
    for head, tree, (budget, max_depth) in zip(heads, trees, bounds, strict=True):
        assert set(paths_of(tree)) == naive_tree(head, shape, budget, max_depth)
        assert list(tree.depths) == sorted(tree.depths)
        values = [value(head, path) for path in paths_of(tree)]
        assert [values[tree.ranks.index(rank)] for rank in range(len(tree))] == sorted(values, reverse=True)


@pytest.mark.long
@given(draft_shapes(4, 5), bounds, seeds)
def test_with_ties_the_kept_are_the_best_by_value_and_depth(
    shape: DraftShape, bounds: list[tuple[int, int]], seed: int
) -> None:
    heads = [coarse_head(seed, row) for row in range(len(bounds))]
    search, frontiers = search_with(heads, shape)
    # Building a DraftTree refuses what lacks its parent or has it twice.
    trees = search.host_trees([b for b, _ in bounds], [d for _, d in bounds]).read()
    for head, own, tree, (budget, max_depth) in zip(heads, frontiers, trees, bounds, strict=True):
        ranks = []
        for depth, frontier in enumerate(own[:-1], 1):
            values = [
                np.sort([value(head, (*path, token)) for token in range(VOCAB)])[::-1][: shape.branching]
                for path in frontier
            ]
            level = sorted(itertools.chain(*values), reverse=True)
            assert [value(head, path) for path in own[depth]] == level[: shape.branching]
            if depth <= max_depth:
                ranks += [(-v, depth) for v in level]
        kept, possible = paths_of(tree), [rank for rank in ranks if rank[0] < math.inf]
        assert sorted((-value(head, path), len(path)) for path in kept) == sorted(possible)[:budget]
        assert all(path[:-1] in {(), *kept} for path in kept)


def test_certain_chain_is_kept_whole_before_anything_else() -> None:
    """All values are exactly 0 along it, so ranking by value alone could keep any of its nodes."""

    def head(path: Path) -> Tensor:
        scores = torch.full((VOCAB,), float("-inf"))
        scores[len(path)] = 0.0
        return scores

    search, _ = search_with([head], DraftShape(6, 3, 60))
    for budget in range(1, 7):
        assert search.host_trees([budget], [6]).read() == [chain_of(range(budget))]


@pytest.mark.parametrize("branching", [VOCAB, VOCAB + 5, 64])
def test_branching_beyond_the_vocabulary_takes_all_of_it(branching: int) -> None:
    head = random_head(0, 0)
    search, _ = search_with([head], DraftShape(1, branching, 60))
    assert sorted(search.host_trees([60], [1]).read()[0].tokens) == list(range(VOCAB))
