"""The walk on the device against the verifier's own."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.triton.coupled_walk import coupled_walk
from specdec.kernels.triton.gumbel_argmax import gumbel_argmax
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import NO_TOKEN, Acceptance, NoiseColumns, PackedTrees
from specdec.verify import packed_walks
from tests.kernels.kernel_checks import DEVICE, poisoned_outputs
from tests.kernels.walk_batches import as_lists, with_nodes_at
from tests.strategies import draft_trees, seeds
from tests.trees import chain_of
from tests.triton_launches import recorded_launches

VOCAB = 12


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_outputs("coupled_walk", "gumbel_argmax"):
        yield


class Case(NamedTuple):
    """Trees, and how many tokens there are: one part of scores, or several."""

    trees: list[DraftTree]
    seed: int
    vocab: int = VOCAB


many_trees = st.lists(draft_trees(max_nodes=70, vocab_size=VOCAB), min_size=1, max_size=6)
cases = st.builds(Case, many_trees, seeds, st.sampled_from([VOCAB, 1024, 1025, 3000]))


def walk(tree: DraftTree, emitted: Sequence[int]) -> Acceptance:
    """Follow the emitted tokens down the tree, child by child."""
    path, node = [], ROOT
    while (child := tree.children.get((node, emitted[1 + node]))) is not None:
        path.append(child)
        node = child
    return Acceptance(tuple(path), emitted[1 + node])


def emitted_tokens(tree: DraftTree, generator: random.Random, vocab: int) -> list[int]:
    """Mostly a child's token, so that paths grow long; sometimes any, sometimes none at all."""
    tokens = []
    for node in range(ROOT, len(tree)):
        children = tree.children_of.get(node, ())
        if children and generator.random() < 0.85:
            tokens.append(tree.tokens[generator.choice(children)])
        else:
            tokens.append(generator.choice([NO_TOKEN, generator.randrange(vocab)]))
    return tokens


def scores_for(emitted: Sequence[int], vocab: int) -> tuple[Tensor, NoiseColumns]:
    """Scores, without noise, by which these tokens are emitted."""
    scores = torch.randn(len(emitted), vocab, generator=torch.Generator().manual_seed(len(emitted)))
    for row, token in enumerate(emitted):
        if token == NO_TOKEN:
            scores[row] = float("-inf")
        else:
            scores[row, token] = 9
    key = torch.zeros(len(emitted), dtype=torch.int64, device=DEVICE)
    return scores.to(DEVICE), NoiseColumns(key, key, key, torch.zeros(len(emitted), dtype=torch.bool, device=DEVICE))


def packed(trees: Sequence[DraftTree], max_nodes: int, max_depth: int) -> PackedTrees:
    """The trees as the walk takes them."""
    starts = [0]
    for tree in trees:
        starts.append(starts[-1] + 1 + len(tree))
    tokens = [token for tree in trees for token in tree.tokens]
    parents = [parent for tree in trees for parent in tree.parents]
    tensors = (torch.tensor(part, dtype=torch.int64, device=DEVICE) for part in (tokens, parents, starts))
    return PackedTrees(*tensors, max_nodes, max_depth)


Found = list[tuple[list[int], int, int]]


def walks_of(scores: Tensor, trees: PackedTrees, noise: NoiseColumns) -> Found:
    """Return the kernel's paths, their lengths and last tokens, which are its twin's."""
    found, expected = (as_lists(way(scores, trees, noise)) for way in (coupled_walk, packed_walks.coupled_walk))
    assert found == expected
    return found


@pytest.mark.long
@given(cases)
@example(Case([DraftTree()], 0))
@example(Case([chain_of([1] * 40), DraftTree(), chain_of([2])], 1))
def test_walks_as_the_verifier_does(case: Case) -> None:
    generator = random.Random(case.seed)
    emitted = [emitted_tokens(tree, generator, case.vocab) for tree in case.trees]
    max_nodes = max(len(tree) for tree in case.trees) + generator.randrange(3)
    depth = max((max(tree.depths, default=0) for tree in case.trees), default=0) + generator.randrange(3)
    scores, noise = scores_for([token for row in emitted for token in row], case.vocab)
    expected = []
    for tree, said in zip(case.trees, emitted, strict=True):
        path, token = walk(tree, said)
        expected.append(([*path, *[-1] * (depth - len(path))], len(path), token))
    assert walks_of(scores, packed(case.trees, max_nodes, depth), noise) == expected


@pytest.mark.long
@given(cases, st.integers(0, 4))
def test_a_path_of_the_greatest_length_ends_with_its_last_nodes_token(case: Case, depth: int) -> None:
    generator = random.Random(case.seed)
    emitted = [emitted_tokens(tree, generator, case.vocab) for tree in case.trees]
    scores, noise = scores_for([token for row in emitted for token in row], case.vocab)
    expected = []
    for tree, said in zip(case.trees, emitted, strict=True):
        path = list(walk(tree, said).path[:depth])
        expected.append((path + [-1] * (depth - len(path)), len(path), said[1 + path[-1] if path else 0]))
    assert walks_of(scores, packed(case.trees, max(len(tree) for tree in case.trees), depth), noise) == expected


@pytest.mark.long
@given(many_trees, seeds, st.sampled_from([VOCAB, 1500]))
def test_the_tokens_are_those_of_the_argmax_with_noise(many: list[DraftTree], seed: int, vocab: int) -> None:
    """To the bit: a row without drafts gets the same token."""
    generator, depth = torch.Generator().manual_seed(seed), max(max(tree.depths, default=0) for tree in many)
    rows = sum(1 + len(tree) for tree in many)
    scores = torch.randn(rows, vocab, generator=generator)
    # Tokens of nodes are likelier, or no path would be long.
    scores[:, :VOCAB] += 3
    keys = torch.randint(0, 2**62, (3, rows), generator=generator).to(DEVICE)
    noise = NoiseColumns(*keys, (torch.rand(rows, generator=generator) < 0.7).to(DEVICE))
    emitted, start, expected = gumbel_argmax(scores.to(DEVICE), noise).tolist(), 0, []
    for tree in many:
        path, token = walk(tree, emitted[start : start + 1 + len(tree)])
        expected.append(([*path, *[-1] * (depth - len(path))], len(path), token))
        start += 1 + len(tree)
    trees = packed(many, max(map(len, many)), depth)
    assert as_lists(coupled_walk(scores.to(DEVICE), trees, noise)) == expected


def test_one_form_is_compiled_wherever_nodes_begin() -> None:
    """Another would be compiled while serving."""
    trees, (scores, noise) = packed([chain_of([1, 2, 3])], 3, 3), scores_for([1, 2, 3, 4], VOCAB)
    with recorded_launches() as found:
        outcomes = [as_lists(coupled_walk(scores, with_nodes_at(trees, offset), noise)) for offset in (0, 1, 2, 3)]
    assert outcomes == [[([0, 1, 2], 3, 4)]] * 4
    assert len([launch for launch in found.values() if "coupled_walk" in launch.kernel]) == 1


def test_of_equal_siblings_the_first_is_taken() -> None:
    """No tree of ours has such; the order of a node's children still is the one in which they are tested."""
    parts = (torch.tensor(part, device=DEVICE) for part in ([4, 5, 5], [-1, -1, -1], [0, 4]))
    scores, noise = scores_for([5, 0, 1, 2], VOCAB)
    assert walks_of(scores, PackedTrees(*parts, 3, 2), noise) == [([1, -1], 1, 1)]


def test_no_token_is_carried_by_no_child() -> None:
    parts = (torch.tensor(part, device=DEVICE) for part in ([-1], [-1], [0, 2]))
    scores, noise = scores_for([NO_TOKEN, 3], VOCAB)
    assert walks_of(scores, PackedTrees(*parts, 1, 1), noise) == [([-1], 0, NO_TOKEN)]


def test_misfits_are_refused() -> None:
    scores, noise = scores_for([0] * 4, VOCAB)
    nodes, starts = (torch.zeros(size, dtype=torch.int64, device=DEVICE) for size in (3, 2))
    with pytest.raises(
        ValueError, match=r"tokens \(2,\) .*: not 3 of int64 in one piece, as there are 4 scores of 1 rows"
    ):
        coupled_walk(scores, PackedTrees(nodes[:2], nodes, starts, 3, 3), noise)
    with pytest.raises(ValueError, match="int32"):
        coupled_walk(scores, PackedTrees(nodes.int(), nodes, starts, 3, 3), noise)
    with pytest.raises(ValueError, match=r"\(2,\)"):
        coupled_walk(scores, PackedTrees(nodes, nodes.repeat(2)[::2], starts, 3, 3), noise)
    with pytest.raises(ValueError, match="seeds"):
        coupled_walk(scores, PackedTrees(nodes, nodes, starts, 3, 3), noise._replace(seeds=nodes))
