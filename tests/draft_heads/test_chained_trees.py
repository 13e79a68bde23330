"""Chains beside the nodes of a model, on the host and on a device."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft_heads.drafting.chained_trees import add_chains
from specdec.draft_heads.drafting.chains import ChainNodes
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.types.device_trees import DeviceTrees
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import DraftTree
from tests.draft_heads.searched_levels import device_trees_of, random_head, search_with
from tests.draft_heads.tree_equality import assert_nodes_equal, assert_packed_equal, assert_read_equal
from tests.strategies import draft_trees, seeds

CPU = torch.device("cpu")
VOCAB = 5
some_chains = draft_trees(7, VOCAB, 1).map(lambda tree: ChainNodes(tree.tokens, tree.parents))


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(token for token in path if token >= 0) for path in tree.path_tokens[1:]]


@given(draft_trees(9, VOCAB), some_chains)
def test_a_merged_tree_has_the_paths_of_both_and_the_models_nodes_first(tree: DraftTree, chains: ChainNodes) -> None:
    (both,) = add_chains(HostTrees([tree]), [chains], CPU).read()
    own, more = paths_of(tree), paths_of(DraftTree(tuple(chains.tokens), tuple(chains.parents)))
    assert paths_of(both)[: len(tree)] == own
    assert set(paths_of(both)) == {*own, *more}
    assert len(both) == len({*own, *more}) == len(tree) + both.num_chained
    assert both.ranks == tuple(range(len(both)))


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | some_chains), min_size=1, max_size=4), seeds)
def test_on_a_device_they_are_the_trees_of_the_host(rows: list[tuple[int, ChainNodes | None]], seed: int) -> None:
    search, _ = search_with([random_head(seed, row) for row in range(len(rows))], DraftShape(3, 3, 9))
    budgets, depths, chains = [budget for budget, _ in rows], [3] * len(rows), [own for _, own in rows]
    host = add_chains(search.host_trees(budgets, depths), chains, CPU)
    drafted = device_trees_of(search, budgets, depths)
    device = add_chains(drafted, chains, CPU)
    assert device.sizes == host.sizes
    assert device.is_drawn == host.is_drawn
    assert_nodes_equal(device, host)
    assert_packed_equal(device, host)
    if isinstance(device, DeviceTrees):
        # Only where both have nodes must the model's be read before.
        both = any(budget and own for budget, own in rows)
        assert (drafted.batch.host is not None) == both
        assert device.batch.host is None
    assert_read_equal(device.read(), host.read())
    assert [tree.num_chained for tree in device.read()] == [tree.num_chained for tree in host.read()]
