"""Block verification over tensors: equal to the exact walk, also at the edges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.reference.block_walk import walk_block
from specdec.kernels.reference.rejection_walk import walk_rejection
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import NO_TOKEN, Acceptance
from tests.trees import chain_of
from tests.verify.exact import Chooser, Model, chain_shape, drawn_tree, outcomes
from tests.verify.fixed_coins import LARGEST_COIN, FixedCoins, vector
from tests.verify.models import CHAIN_LENGTH, models
from tests.verify.replay import assert_floats_follow_fractions


def chain(*tokens: int, q: torch.Tensor) -> DraftTree:
    """The same q everywhere."""
    return DraftTree(tokens, tuple(range(-1, len(tokens) - 1)), torch.stack([q] * (1 + len(tokens))))


@given(models, st.data())
def test_floats_follow_fractions(model: Model, data: st.DataObject) -> None:
    shape = chain_shape(data.draw(st.integers(0, CHAIN_LENGTH[model.vocab_size])))

    def run(chooser: Chooser) -> DraftTree:
        return drawn_tree(model, shape, lambda depth, rank, rest: chooser.choose(rest))  # noqa: ARG005

    drafts = [tree for tree, _ in outcomes(run)]
    for tree in data.draw(st.lists(st.sampled_from(drafts), min_size=1, max_size=5)):
        assert_floats_follow_fractions(walk_block, model, tree)


def test_example_of_the_paper() -> None:
    """Sun et al. 2025, section 2: p = (1/3, 2/3), q = (2/3, 1/3), two drafts; 11/9 tokens are accepted."""
    p, q = vector(1 / 3, 2 / 3), vector(2 / 3, 1 / 3)
    accepted = 0.0
    for x in range(2):
        for y in range(2):
            tree = chain(x, y, q=q)
            chance = FixedCoins(1.0)
            walk_block(tree, lambda _: p, chance)
            (*_, whole), (*_, first) = chance.asked
            accepted += float(q[x] * q[y]) * (2 * whole + (1 - whole) * first)
    assert accepted == pytest.approx(11 / 9)


def test_no_drafts_is_plain_sampling() -> None:
    chance = FixedCoins(0.0)
    assert walk_block(DraftTree(), lambda _: vector(0.2, 0.5, 0.3), chance) == Acceptance((), 1)
    assert chance.drawn_from == [0.2, 0.5, 0.3]
    assert chance.asked == []


def test_whole_chain_where_p_is_q() -> None:
    """Nothing is left of p - q anywhere, and nothing of it is needed."""
    p = vector(0.3, 0.7)
    assert walk_block(chain(1, 0, 1, q=p), lambda _: p, FixedCoins(LARGEST_COIN)) == Acceptance((0, 1, 2), 1)


def test_a_draw_from_p_follows_when_rounding_rejects_p_equal_to_q() -> None:
    p = vector(0.3, 0.7)
    chance = FixedCoins(1.0)
    assert walk_block(chain(1, 0, q=p), lambda _: p, chance) == Acceptance((), 1)
    assert chance.asked == [(1, 0, 1.0), (0, 0, 1.0)]
    assert chance.drawn_from == p.tolist()


def test_coin_of_zero_accepts_nothing_impossible() -> None:
    assert walk_block(chain(0, 1, q=vector(0.5, 0.5)), lambda _: vector(0, 1), FixedCoins(0.0)) == Acceptance((), 1)


def test_token_that_q_cannot_have_drawn_ends_the_chain() -> None:
    q = vector(0.5, 0.5, 0)
    assert walk_block(chain(0, 2, 1, q=q), lambda _: vector(0.5, 0.2, 0.3), FixedCoins(0.0)).path == (0,)
    assert walk_block(chain(2, 0, q=q), lambda _: vector(0.5, 0.2, 0.3), FixedCoins(0.0)).path == ()


def test_every_prefix_has_a_coin_of_its_own() -> None:
    chance = FixedCoins(1.0)
    walk_block(chain(0, 0, 0, q=vector(0.5, 0.5)), lambda _: vector(0.4, 0.6), chance)
    assert [(depth, rank) for depth, rank, _ in chance.asked] == [(2, 0), (1, 0), (0, 0)]


def test_leaves_p_and_q_as_they_are() -> None:
    p, q = vector(0.1, 0.9), vector(0.6, 0.4)
    tree = chain(0, 0, q=q)
    walk_block(tree, lambda _: p, FixedCoins(LARGEST_COIN))
    assert p.tolist() == [0.1, 0.9]
    assert tree.draft_probs is not None
    assert torch.equal(torch.stack([q] * 3), tree.draft_probs)


def test_refuses_drawn_branches() -> None:
    tree = DraftTree((0, 1), (ROOT, ROOT), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"takes a chain, not parents \(-1, -1\)"):
        walk_block(tree, lambda _: vector(0.5, 0.5), FixedCoins(0.0))


@pytest.mark.parametrize("coin", [0.0, 0.45, LARGEST_COIN])
@pytest.mark.parametrize("tree", [chain_of([0, 1]), DraftTree((0, 1, 1), (ROOT, ROOT, 0))])
def test_a_tree_that_was_not_drawn_is_walked_by_rejection(tree: DraftTree, coin: float) -> None:
    p = vector(0.4, 0.6)
    mine, other = FixedCoins(coin), FixedCoins(coin)
    assert walk_block(tree, lambda _: p, mine) == walk_rejection(tree, lambda _: p, other)
    assert mine.asked == other.asked


@pytest.mark.parametrize("end", [ROOT, 0, 1, 2])
def test_nothing_behind_a_node_without_a_distribution_is_looked_at(end: int) -> None:
    """The chain up to the node is judged as a chain of its own, also where it is then cut further up."""
    p, q = vector(0.3, 0.7), vector(0.6, 0.4)
    asked: list[int] = []

    def target(node: int) -> torch.Tensor | None:
        asked.append(node)
        return None if node == end else p

    kept = tuple(range(end + 1))
    assert walk_block(chain(1, 1, 1, q=q), target, FixedCoins(0.0)) == Acceptance(kept, NO_TOKEN)
    assert max(asked) == end
    ended, short = FixedCoins(0.8), FixedCoins(0.8)
    found = walk_block(chain(0, 0, 0, q=q), target, ended)
    alone = walk_block(chain(*[0] * (end + 1), q=q), lambda _: p, short)
    assert ended.asked == short.asked
    assert found == (Acceptance((), NO_TOKEN) if end == ROOT else alone)
