"""DraftTree against its definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.types.tree import ROOT, DraftTree
from tests.strategies import draft_trees
from tests.trees import chain_of

trees = draft_trees(max_nodes=130, vocab_size=7)


def climb(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the root's child to `node`, by recursion."""
    return [] if node == ROOT else [*climb(tree, tree.parents[node]), node]


@given(trees)
def test_depth_equals_length_of_path(tree: DraftTree) -> None:
    assert list(tree.depths) == [len(climb(tree, node)) for node in range(len(tree))]


@given(trees)
def test_ancestor_bits_equal_nodes_of_path(tree: DraftTree) -> None:
    assert list(tree.ancestors) == [sum(1 << n for n in climb(tree, node)) for node in range(len(tree))]


@given(trees)
def test_children_lead_to_every_node_once(tree: DraftTree) -> None:
    assert sorted(tree.children.values()) == list(range(len(tree)))
    assert all(tree.children[tree.parents[n], tree.tokens[n]] == n for n in range(len(tree)))


@given(st.lists(st.integers(0, 5), max_size=80))
def test_chain_is_one_path_that_may_repeat_tokens(tokens: list[int]) -> None:
    chain = chain_of(tokens)
    assert list(chain.tokens) == tokens
    assert list(chain.depths) == list(range(1, len(tokens) + 1))
    assert not tokens or climb(chain, len(tokens) - 1) == list(range(len(tokens)))


def test_empty_tree_has_nothing() -> None:
    assert len(DraftTree()) == 0
    assert DraftTree().depths == DraftTree().ancestors == ()


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((1, 2), (ROOT,), "2 tokens for 1 parents"),
        ((1,), (0,), "parent 0 of node 0"),
        ((1, 2), (ROOT, 1), "parent 1 of node 1"),
        ((1, 2), (1, ROOT), "parent 1 of node 0"),
        ((1,), (-2,), "parent -2 of node 0"),
        ((4, 4), (ROOT, ROOT), "same token"),
        ((1, 4, 5, 4), (ROOT, 0, 0, 0), "same token"),
    ],
)
def test_refuses_what_is_no_tree(tokens: tuple[int, ...], parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree(tokens, parents)
