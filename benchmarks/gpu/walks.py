"""The walks down a step's draft trees, against the host's own, as an engine without the kernels walks."""

import random
from collections.abc import Iterator
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from benchmarks.gpu.batch import random_tree
from benchmarks.gpu.race import EXACT, Case, Peer, Subject
from benchmarks.gpu.sizes import Sizes
from specdec.kernels.triton.rejection_walk import rejection_walk
from specdec.kernels.triton.tree_walk import tree_walk
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import DraftProbs, NoiseColumns, PackedTrees
from specdec.verify import packed_walks

# Chance that the target emits a child's token, so that paths grow long.
ACCEPTED = 0.85
# Of the drafted tokens, how much likelier they are by q than by p.
TOO_LIKELY = 1.25


def subjects(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    for rows in sizes.walks:
        yield Subject("tree_walk", {"rows": rows}, partial(_tree_walk, sizes, rows, device))
        yield Subject("rejection_walk", {"rows": rows}, partial(_rejection_walk, sizes, rows, device))


def _tree_walk(sizes: Sizes, rows: int, device: torch.device) -> Case:
    chance = random.Random(rows)
    trees = [random_tree(sizes.tree, chance) for _ in range(rows)]
    starts = _starts(trees)
    emitted = [token for tree in trees for token in _emitted(tree, chance)]
    tokens = [token for tree in trees for token in tree.tokens]
    parents = [parent for tree in trees for parent in tree.parents]
    a, b, c, d = (torch.tensor(part, device=device) for part in (emitted, tokens, parents, starts))
    inputs = (a, PackedTrees(b, c, d, sizes.tree.nodes, sizes.tree.depth))
    return Case(
        run=lambda: tree_walk(*inputs),
        twin=lambda: packed_walks.tree_walk(*inputs),
        num_bytes=8 * (len(emitted) + len(tokens) + len(parents) + len(starts)),
        bound=EXACT,
        peers={"host": Peer(lambda: packed_walks.tree_walk(*inputs), captured=False)},
    )


def _emitted(tree: DraftTree, chance: random.Random) -> list[int]:
    """The token after the root and after each node: mostly a child's, else one that no child carries."""
    tokens = []
    for node in range(ROOT, len(tree)):
        children = tree.children_of.get(node, ())
        is_accepted = children and chance.random() < ACCEPTED
        tokens.append(tree.tokens[chance.choice(children)] if is_accepted else max(tree.tokens) + 1)
    return tokens


def _rejection_walk(sizes: Sizes, rows: int, device: torch.device) -> Case:
    chance = random.Random(rows)
    trees = [random_tree(sizes.tree, chance) for _ in range(rows)]
    inputs = _weighed(sizes, trees, device)
    return Case(
        run=lambda: rejection_walk(*inputs),
        twin=lambda: packed_walks.rejection_walk(*inputs),
        num_bytes=_bytes_read(inputs[0], packed_walks.rejection_walk(*inputs).lengths),
        bound=EXACT,
        peers={"host": Peer(lambda: packed_walks.rejection_walk(*inputs), captured=False)},
    )


def _weighed(
    sizes: Sizes, trees: list[DraftTree], device: torch.device
) -> tuple[Tensor, DraftProbs, PackedTrees, NoiseColumns]:
    """Return scores, draft probabilities, trees and noise of trees whose tokens are all equally probable.

    All numbers are of few bits, so that float32 makes no rounding and kernel and twin never differ: by p, all tokens
    of the first half of a power of two are equally likely; by q, those that any tree carries are a little likelier.
    """
    count = sum(1 + len(tree) for tree in trees)
    possible = 1 << (sizes.vocabulary.bit_length() - 1)
    tokens = torch.tensor([token % possible for tree in trees for token in tree.tokens], device=device)
    scores = torch.full((count, sizes.vocabulary), float("-inf"), device=device)
    scores[:, :possible] = 0.0
    probs = torch.zeros(sizes.vocabulary, device=device)
    probs[:possible] = 1 / possible
    probs[tokens] = TOO_LIKELY / possible
    draft_probs = DraftProbs(probs[None] / probs.sum(), torch.zeros(count, dtype=torch.int64, device=device))
    parents, starts = [parent for tree in trees for parent in tree.parents], _starts(trees)
    parts = tokens, torch.tensor(parents, device=device), torch.tensor(starts, device=device)
    seeds, samples, positions = torch.randint(0, 2**62, (3, len(trees)), device=device)
    noise = NoiseColumns(seeds, samples, positions, torch.ones(len(trees), dtype=torch.bool, device=device))
    return scores, draft_probs, PackedTrees(*parts, sizes.tree.nodes, sizes.tree.depth), noise


def _bytes_read(scores: Tensor, lengths: Tensor) -> int:
    """Return the bytes of scores that a walk reads: those of the root and of each node on its path, once."""
    return int((lengths + 1).sum()) * scores[0].numel() * scores.element_size()


def _starts(trees: list[DraftTree]) -> list[int]:
    return [0, *accumulate(1 + len(tree) for tree in trees)]
