"""The walks down a step's draft trees, against those of an engine without the kernels, and what follows them."""

import random
from collections.abc import Iterator
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from benchmarks.gpu.batch import path_of, random_tree
from benchmarks.gpu.race import EXACT, Case, Peer, Subject
from benchmarks.gpu.sizes import Sizes
from specdec.kernels.reference import accepted as reference
from specdec.kernels.triton.accepted import commit
from specdec.kernels.triton.coupled_walk import coupled_walk
from specdec.kernels.triton.rejection_walk import rejection_walk
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import DraftedEntries, DraftProbs, NoiseColumns, PackedTrees, TokenTargets, Walk
from specdec.verify import packed_walks

# Chance that the target emits a child's token, so that paths grow long.
ACCEPTED = 0.85
# Of the drafted tokens, how much likelier they are by q than by p.
TOO_LIKELY = 1.25


def subjects(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    for rows in sizes.walks:
        yield Subject("coupled_walk", {"rows": rows}, partial(_coupled_walk, sizes, rows, device))
        yield Subject("rejection_walk", {"rows": rows}, partial(_rejection_walk, sizes, rows, device))
        yield Subject("commit", {"rows": rows}, partial(_commit, sizes, rows, device))


def _coupled_walk(sizes: Sizes, rows: int, device: torch.device) -> Case:
    """Walk trees of greedy rows. Scores are random, with the emitted tokens above all others."""
    chance = random.Random(rows)
    trees = [random_tree(sizes.tree, chance) for _ in range(rows)]
    emitted = [token for tree in trees for token in _emitted(tree, chance)]
    scores = torch.rand(len(emitted), sizes.vocabulary, dtype=sizes.dtype, device=device)
    scores[torch.arange(len(emitted), device=device), torch.tensor(emitted, device=device)] = 2
    key = torch.zeros(len(emitted), dtype=torch.int64, device=device)
    inputs = scores, _packed(trees, sizes, device), NoiseColumns(key, key, key, key != 0)
    return Case(
        run=lambda: coupled_walk(*inputs),
        twin=lambda: packed_walks.coupled_walk(*inputs),
        num_bytes=scores.numel() * scores.element_size(),
        bound=EXACT,
        peers={"host": Peer(lambda: packed_walks.coupled_walk(*inputs), captured=False)},
    )


def _packed(trees: list[DraftTree], sizes: Sizes, device: torch.device) -> PackedTrees:
    tokens = [token for tree in trees for token in tree.tokens]
    parents = [parent for tree in trees for parent in tree.parents]
    a, b, c = (torch.tensor(part, device=device) for part in (tokens, parents, _starts(trees)))
    return PackedTrees(a, b, c, sizes.tree.nodes, sizes.tree.depth)


def _commit(sizes: Sizes, rows: int, device: torch.device) -> Case:
    """Commit one random accepted path per request. The next trees are drafted for all requests."""
    chance, depth, most = random.Random(rows), sizes.tree.depth, sizes.tree.nodes
    trees = [random_tree(sizes.tree, chance) for _ in range(rows)]
    paths = [path_of(tree, chance.randrange(len(tree))) for tree in trees]
    padded = [[*path, *[-1] * (depth - len(path))] for path in paths]
    lengths = torch.tensor([len(path) for path in paths], device=device)
    walk = Walk(torch.tensor(padded, device=device), lengths, torch.zeros_like(lengths))
    num_slots = 2 * rows * most
    slots = torch.tensor(chance.sample(range(num_slots), rows * most), device=device).view(rows, most)
    shape = sizes.layers, num_slots, 2 * sizes.kv_heads, sizes.head_dim
    entries = DraftedEntries(torch.rand(shape, dtype=sizes.dtype, device=device), None, slots)
    firsts = torch.arange(rows, device=device) * most
    tokens, accepted, noise = torch.zeros(rows, depth + 1, dtype=torch.int64, device=device), lengths.clone(), firsts
    target = TokenTargets(
        _packed(trees, sizes, device).tokens, torch.arange(rows, device=device), firsts.clone(), tokens, accepted,
        tokens.clone(), tokens[:, :depth].clone(), noise,
    )  # fmt: skip
    return Case(
        run=lambda: commit(walk, entries, [target]),
        twin=lambda: reference.commit(walk, entries, [target]),
        num_bytes=2 * int(lengths.sum()) * entries.kv[:, 0].numel() * entries.kv.element_size(),
        bound=EXACT,
        peers={"torch": Peer(lambda: reference.commit(walk, entries, [target]), captured=False)},
        changed=(entries.kv, tokens, accepted, noise),
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
        num_bytes=inputs[0].numel() * inputs[0].element_size(),
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


def _starts(trees: list[DraftTree]) -> list[int]:
    return [0, *accumulate(1 + len(tree) for tree in trees)]
