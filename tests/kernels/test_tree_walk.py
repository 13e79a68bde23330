"""The walk on the device against the verifier's own."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.triton.tree_walk import tree_walk
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import NO_TOKEN, Acceptance, PackedTrees, Walk
from specdec.verify import packed_walks
from tests.kernels.kernel_checks import DEVICE, poisoned_outputs
from tests.strategies import draft_trees, seeds
from tests.trees import chain_of

VOCAB = 12


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_outputs("tree_walk"):
        yield


class Case(NamedTuple):
    trees: list[DraftTree]
    seed: int


cases = st.builds(Case, st.lists(draft_trees(max_nodes=70, vocab_size=VOCAB), min_size=1, max_size=6), seeds)


def walk(tree: DraftTree, emitted: Sequence[int]) -> Acceptance:
    """Follow the emitted tokens down the tree, child by child."""
    path, node = [], ROOT
    while (child := tree.children.get((node, emitted[1 + node]))) is not None:
        path.append(child)
        node = child
    return Acceptance(tuple(path), emitted[1 + node])


def emitted_tokens(tree: DraftTree, generator: random.Random) -> list[int]:
    """Mostly a child's token, so that paths grow long; sometimes any, sometimes none at all."""
    tokens = []
    for node in range(ROOT, len(tree)):
        children = tree.children_of.get(node, ())
        if children and generator.random() < 0.85:
            tokens.append(tree.tokens[generator.choice(children)])
        else:
            tokens.append(generator.choice([NO_TOKEN, generator.randrange(VOCAB)]))
    return tokens


def packed(
    trees: Sequence[DraftTree], emitted: Sequence[Sequence[int]], max_nodes: int, max_depth: int
) -> tuple[Tensor, PackedTrees]:
    """The walk's arguments."""
    starts = [0]
    for tree in trees:
        starts.append(starts[-1] + 1 + len(tree))
    parts = (
        [token for row in emitted for token in row],
        [token for tree in trees for token in tree.tokens],
        [parent for tree in trees for parent in tree.parents],
        starts,
    )
    said, *tensors = (torch.tensor(part, dtype=torch.int64, device=DEVICE) for part in parts)
    return said, PackedTrees(*tensors, max_nodes, max_depth)


def as_lists(found: Walk) -> list[tuple[list[int], int, int]]:
    return list(zip(*(part.tolist() for part in found), strict=True))


@given(cases)
@example(Case([DraftTree()], 0))
@example(Case([chain_of([1] * 40), DraftTree(), chain_of([2])], 1))
def test_walks_as_the_verifier_does(case: Case) -> None:
    generator = random.Random(case.seed)
    emitted = [emitted_tokens(tree, generator) for tree in case.trees]
    max_nodes = max(len(tree) for tree in case.trees) + generator.randrange(3)
    depth = max((max(tree.depths, default=0) for tree in case.trees), default=0) + generator.randrange(3)
    arguments = packed(case.trees, emitted, max_nodes, depth)
    expected = []
    for tree, said in zip(case.trees, emitted, strict=True):
        path, token = walk(tree, said)
        expected.append(([*path, *[-1] * (depth - len(path))], len(path), token))
    assert as_lists(tree_walk(*arguments)) == expected
    assert as_lists(packed_walks.tree_walk(*arguments)) == expected


@given(cases, st.integers(0, 4))
def test_a_path_of_the_greatest_length_ends_with_its_last_nodes_token(case: Case, depth: int) -> None:
    generator = random.Random(case.seed)
    emitted = [emitted_tokens(tree, generator) for tree in case.trees]
    arguments = packed(case.trees, emitted, max(len(tree) for tree in case.trees), depth)
    expected = []
    for tree, said in zip(case.trees, emitted, strict=True):
        path = list(walk(tree, said).path[:depth])
        expected.append((path + [-1] * (depth - len(path)), len(path), said[1 + path[-1] if path else 0]))
    assert as_lists(tree_walk(*arguments)) == expected
    assert as_lists(packed_walks.tree_walk(*arguments)) == expected


def test_of_equal_siblings_the_first_is_taken() -> None:
    """No tree of ours has such; the order of a node's children still is the one in which they are tested."""
    emitted, tokens, parents = ([5, 0, 1, 2], [4, 5, 5], [-1, -1, -1])
    said, *parts = (torch.tensor(part, device=DEVICE) for part in (emitted, tokens, parents, [0, 4]))
    trees = PackedTrees(*parts, 3, 2)
    for found in (tree_walk(said, trees), packed_walks.tree_walk(said, trees)):
        assert as_lists(found) == [([1, -1], 1, 1)]


def test_no_token_is_carried_by_no_child() -> None:
    said, *parts = (torch.tensor(part, device=DEVICE) for part in ([-1, 3], [-1], [-1], [0, 2]))
    trees = PackedTrees(*parts, 1, 1)
    for found in (tree_walk(said, trees), packed_walks.tree_walk(said, trees)):
        assert as_lists(found) == [([-1], 0, NO_TOKEN)]


def test_misfits_are_refused() -> None:
    emitted, nodes, starts = (torch.zeros(size, dtype=torch.int64, device=DEVICE) for size in (4, 3, 2))
    with pytest.raises(ValueError, match="4 emitted tokens, 2 nodes, 3 parents and 1 rows"):
        tree_walk(emitted, PackedTrees(nodes[:2], nodes, starts, 3, 3))
    with pytest.raises(ValueError, match="int32"):
        tree_walk(emitted, PackedTrees(nodes.int(), nodes, starts, 3, 3))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        tree_walk(emitted, PackedTrees(nodes, nodes.repeat(2)[::2], starts, 3, 3))
