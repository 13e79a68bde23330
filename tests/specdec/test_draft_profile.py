"""Profiles of draft models from traced trees."""

import math
import random

import pytest

from specdec.bench.draft_profile import EDGES, DraftProfile
from specdec.core.outputs import TreeTrace


def tree(values: list[float | None], parents: tuple[int, ...], path: tuple[int, ...]) -> TreeTrace:
    logs = tuple(None if value is None else math.log(value) for value in values)
    tokens = tuple(range(len(parents)))
    return TreeTrace(0, tokens, parents, path, tokens, logs)


def test_ranks_follow_the_models_own_values() -> None:
    """Nodes 1, 0, 2 in their order. The last, without a value, is a chain's."""
    profile = DraftProfile.of([tree([0.3, 0.6, 0.2, None], (-1, -1, 0, 2), (1,))] * 3 + [tree([0.9], (-1,), ())])
    assert profile.rank_values == [0.75, 0.0, 0.0]


def test_chances_are_of_nodes_whose_parents_were_accepted() -> None:
    chance, trees = random.Random(0), []
    for _ in range(4000):
        path: tuple[int, ...] = ()
        if chance.random() < 0.4:
            path = (0, 2) if chance.random() < 0.9 else (0,)
        elif chance.random() < 0.5:
            path = (1,)
        trees.append(tree([0.65, 0.25, 0.65 * 0.85], (-1, -1, 0), path))
    profile = DraftProfile.of(trees)

    def cell(rank: int, confidence: float) -> tuple[float, int]:
        found = profile.chances[rank][sum(edge <= confidence for edge in EDGES)]
        return found.accepted, found.nodes

    (first, all_trees), (second, _), (child, parents) = cell(0, 0.65), cell(1, 0.25), cell(0, 0.85)
    assert (first, second, child) == pytest.approx((0.4, 0.3, 0.9), abs=0.04)
    assert all_trees == 4000
    assert 1400 < parents < 1800
    assert profile.calibration_error < 0.02
    assert sum(each.nodes for each in profile.calibration) == 3 * 2000


def test_the_calibration_error_shows_values_that_do_not_hold() -> None:
    """Learnt from trees that are always accepted, tested on trees that never are."""
    good, bad = tree([0.9], (-1,), (0,)), tree([0.9], (-1,), ())
    assert DraftProfile.of([good, bad] * 200).calibration_error > 0.9
