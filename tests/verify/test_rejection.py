"""Recursive rejection over tensors: what the engine runs equals the exact walk, also at the edges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import NO_TOKEN, Acceptance
from specdec.verify.rejection import walk_rejection
from tests.verify.exact import Chooser, Model, drawn_tree, outcomes
from tests.verify.fixed_coins import LARGEST_COIN, FixedCoins, vector
from tests.verify.models import SAMPLED_NODES, fixed_trees, models, tree_shapes
from tests.verify.replay import assert_floats_follow_fractions


def siblings(*tokens: int, q: torch.Tensor | None = None) -> DraftTree:
    """Children of the root."""
    probs = None if q is None else torch.stack([q] * (1 + len(tokens)))
    return DraftTree(tokens, (ROOT,) * len(tokens), probs)


@given(models, st.data())
def test_floats_follow_fractions_for_one_hot_children(model: Model, data: st.DataObject) -> None:
    assert_floats_follow_fractions(walk_rejection, model, data.draw(fixed_trees(model.vocab_size)))


@pytest.mark.long
@given(models, st.data())
def test_floats_follow_fractions_for_sampled_children(model: Model, data: st.DataObject) -> None:
    shape = data.draw(tree_shapes(SAMPLED_NODES[model.vocab_size], min(3, model.vocab_size)))

    def run(chooser: Chooser) -> DraftTree:
        return drawn_tree(model, shape, lambda depth, rank, rest: chooser.choose(rest))  # noqa: ARG005

    drafts = [tree for tree, _ in outcomes(run)]
    for tree in data.draw(st.lists(st.sampled_from(drafts), min_size=1, max_size=5)):
        assert_floats_follow_fractions(walk_rejection, model, tree)


def test_no_drafts_is_plain_sampling() -> None:
    chance = FixedCoins(0.0)
    p = vector(0.2, 0.5, 0.3)
    assert walk_rejection(DraftTree(), lambda _: p, chance) == Acceptance((), 1)
    assert chance.drawn_from == p.tolist()
    assert chance.asked == []


@pytest.mark.parametrize("q", [None, vector(0.5, 0.5, 0)])
def test_coin_of_zero_accepts_nothing_impossible(q: torch.Tensor | None) -> None:
    assert walk_rejection(siblings(0, q=q), lambda _: vector(0, 0, 1), FixedCoins(0.0)) == Acceptance((), 2)


@pytest.mark.parametrize("q", [None, vector(0.5, 0.5, 0)])
def test_largest_coin_accepts_what_is_certain(q: torch.Tensor | None) -> None:
    chance = FixedCoins(LARGEST_COIN)
    assert walk_rejection(siblings(1, q=q), lambda _: vector(0, 1, 0), chance) == Acceptance((0,), 1)


def test_child_that_q_cannot_have_drawn_is_passed_over() -> None:
    """It is not accepted, however small the coin, and takes nothing from p or q."""
    chance = FixedCoins(0.0)
    p, q = vector(0.1, 0.3, 0.6), vector(0.5, 0.5, 0)
    assert walk_rejection(siblings(2, 1, q=q), lambda _: p, chance) == Acceptance((1,), 2)
    assert chance.asked == [(0, 1, 0.6)]


def test_more_children_than_q_has_tokens() -> None:
    """After q's last token is rejected, whatever else is there is passed over."""
    chance = FixedCoins(LARGEST_COIN)
    p, q = vector(0.1, 0.1, 0.8), vector(0.5, 0.5, 0)
    assert walk_rejection(siblings(0, 1, 2, q=q), lambda _: p, chance) == Acceptance((), 2)
    assert [rank for _, rank, _ in chance.asked] == [0, 1]
    assert chance.drawn_from == pytest.approx([0, 0, 1])


def test_residual_of_nothing_falls_back_to_p() -> None:
    """One part in 2^53 short of certain, and the coin hits it: p - q leaves nothing, and p is drawn from."""
    q = vector(0.5, 0.5, 0)
    p = q * LARGEST_COIN
    chance = FixedCoins(LARGEST_COIN)
    assert walk_rejection(siblings(1, q=q), lambda _: p, chance).path == ()
    assert chance.drawn_from == p.tolist()
    assert walk_rejection(siblings(1), lambda _: vector(0, LARGEST_COIN, 0), chance) == Acceptance((), 1)


def test_siblings_are_tried_in_their_order() -> None:
    chance = FixedCoins(LARGEST_COIN)
    p, q = vector(0.1, 0.2, 0.3, 0.4), vector(0.4, 0.3, 0.2, 0.1)
    assert walk_rejection(siblings(1, 0, q=q), lambda _: p, chance) == Acceptance((), 3)
    # p - q leaves (0, 0, 1/4, 3/4) and q loses token 1: token 0 has no chance left.
    assert chance.asked == [(0, 0, pytest.approx(0.2 / 0.3)), (0, 1, 0.0)]
    assert chance.drawn_from[:2] == [0, 0]
    one_hot = FixedCoins(LARGEST_COIN)
    walk_rejection(siblings(3, 0), lambda _: p, one_hot)
    assert one_hot.asked == [(0, 0, 0.4), (0, 1, pytest.approx(0.1 / 0.6))]
    assert one_hot.drawn_from == pytest.approx([0, 0.4, 0.6, 0])


def test_walks_down_with_each_nodes_own_p_and_q() -> None:
    tree = DraftTree((0, 1, 2), (ROOT, 0, 1), torch.eye(4, 3, dtype=torch.float64))
    asked: list[int] = []

    def target(node: int) -> torch.Tensor:
        asked.append(node)
        return vector(0.2, 0.3, 0.5)

    assert walk_rejection(tree, target, FixedCoins(0.0)) == Acceptance((0, 1, 2), 2)
    assert asked == [ROOT, 0, 1, 2]


def test_leaves_p_and_q_as_they_are() -> None:
    p, q = vector(0.1, 0.2, 0.7), vector(0.6, 0.3, 0.1)
    tree = siblings(0, 1, q=q)
    walk_rejection(tree, lambda _: p, FixedCoins(LARGEST_COIN))
    walk_rejection(siblings(0, 1), lambda _: p, FixedCoins(LARGEST_COIN))
    assert p.tolist() == [0.1, 0.2, 0.7]
    assert tree.draft_probs is not None
    assert torch.equal(torch.stack([q] * 3), tree.draft_probs)


@pytest.mark.parametrize("end", [ROOT, 0, 1])
def test_a_path_ends_where_the_target_has_no_distribution(end: int) -> None:
    """The node itself is kept or not regardless of that."""
    tree = DraftTree((0, 1, 2), (ROOT, 0, 1), torch.eye(4, 3, dtype=torch.float64))
    found = walk_rejection(tree, lambda node: None if node == end else vector(0.2, 0.3, 0.5), FixedCoins(0.0))
    assert found == Acceptance(tuple(range(end + 1)), NO_TOKEN)
