"""Values of chains, their tree, and what is learnt from the tokens that come."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft_heads.drafting import chains as module
from specdec.draft_heads.drafting.chains import ELSEWHERE, LONGEST_MATCH, Chain, ChainRates, ChainTree
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import ROOT

some_chains = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 12)), max_size=4)


def test_the_root_is_that_of_trees() -> None:
    assert module.ROOT == ROOT


@given(some_chains, st.integers(0, 12))
def test_the_best_nodes_are_a_tree_and_no_others_are_worth_more(given: list[tuple[list[int], int]], count: int) -> None:
    tree = ChainTree([Chain(tokens, match, ChainRates()) for tokens, match in given])
    assert tree.values == sorted(tree.values, reverse=True)
    assert len(tree) <= len({tuple(tokens[:end]) for tokens, _ in given for end in range(1, 1 + len(tokens))})
    nodes = tree.best(count)
    drawn = DraftTree(tuple(nodes.tokens), tuple(nodes.parents))
    assert len(drawn) == min(count, len(tree))
    # Every path is the beginning of a chain.
    paths = {tuple(token for token in path if token >= 0) for path in drawn.path_tokens[1:]}
    assert all(any(tuple(tokens[: len(path)]) == path for tokens, _ in given) for path in paths)
    assert 0 <= tree.first_value <= 1


def test_values_are_products_of_rates_and_a_second_child_has_what_the_first_leaves() -> None:
    rates = ChainRates()
    first, second, other = rates.rate(3), rates.rate(4), rates.rate(ELSEWHERE)
    tree = ChainTree([Chain([5, 6], 3, rates), Chain([5, 7], 2, rates)])
    assert tree.values == pytest.approx(sorted([first, first * second, first * (1 - second) * other], reverse=True))
    assert tree.first_value == first
    assert tree.best(2) == ([5, 6], [ROOT, 0])


def test_the_acceptance_of_each_match_is_learnt_for_the_request_and_for_its_source() -> None:
    chance, source = random.Random(0), ChainRates()
    true = [0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.97]
    for _ in range(4):
        rates = ChainRates(source)
        for _ in range(300):
            for match, rate in enumerate(true):
                rates.learn(match + 3 * (match == LONGEST_MATCH), chance.random() < rate)
    for match, rate in enumerate(true):
        assert abs(source.rate(match) - rate) < 0.1
        assert abs(rates.rate(match) - rate) < 0.3
    # A new request begins with what its source has shown.
    assert ChainRates(source).rate(2) == pytest.approx(source.rate(2))


def test_emitted_tokens_tell_of_nodes_up_to_where_they_leave_the_tree() -> None:
    def after(emitted: list[int]) -> list[float]:
        rates = ChainRates()
        before = [rates.rate(match) for match in (3, 4, 5, ELSEWHERE)]
        ChainTree([Chain([5, 6, 8], 3, rates), Chain([5, 7], 2, rates)]).learn(emitted)
        now = [rates.rate(match) for match in (3, 4, 5, ELSEWHERE)]
        return [(b > a) - (b < a) for a, b in zip(before, now, strict=True)]

    assert after([9]) == [-1, 0, 0, 0]
    assert after([5]) == [1, 0, 0, 0]
    assert after([5, 6, 9]) == [1, 1, -1, 0]
    assert after([5, 7, 8]) == [1, -1, 0, 1]
    assert after([5, 9]) == [1, -1, 0, -1]
