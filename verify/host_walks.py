"""The acceptance rules over a batch on the host: what runs where a kernel set has no walk of its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from specdec.kernels.reference import sampling
from specdec.kernels.types.draft_trees import DraftTrees, WalkMaker, at_once
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import NO_TOKEN, ROOT, Acceptance, NoiseKey, NoiseRows, Vector
from specdec.kernels.types.upload import Packet
from specdec.verify.chance import Chance, PhiloxChance

# An acceptance rule: a row's tree, the target's distribution after each node, coins and draws.
Rule = Callable[[DraftTree, Callable[[int], Vector | None], Chance], Acceptance]


def host_coupled_walk(argmax: Callable[[Tensor, NoiseRows], Tensor]) -> WalkMaker:
    """Return the coupled rule as an operation of `KernelSet`; see `Walks.coupled`.

    Args:
        argmax: the argmax of scores `[rows, vocab]` plus each row's noise, int64 `[rows]`: a sample of their softmax.
            The lowest id on ties, `NO_TOKEN` where the largest is not finite. It may overwrite scores of rows with
            noise.
    """

    def walk(scores: Tensor, trees: DraftTrees, noise: NoiseRows) -> list[Acceptance]:
        packet = Packet(scores.device)
        own = trees.noise(noise.keys, packet)
        packet.send()
        tokens: list[int] = argmax(scores, own()).tolist()
        known = trees.read()
        return [follow(tree, tokens[rows]) for tree, rows in zip(known, _rows_of(known), strict=True)]

    return at_once(walk)


def host_walk(rule: Rule) -> WalkMaker:
    """Return a rule as an operation of `KernelSet`, on any device: scores and draft probabilities are read from it."""

    def walk(scores: Tensor, trees: DraftTrees, noise: NoiseRows) -> list[Acceptance]:
        return walk_rows(rule, scores.cpu(), [_on_host(tree) for tree in trees.with_probs()], noise.keys)

    return at_once(walk)


def _on_host(tree: DraftTree) -> DraftTree:
    probs = tree.draft_probs
    return tree if probs is None or probs.is_cpu else replace(tree, draft_probs=probs.cpu(), check=False)


def walk_rows(
    rule: Rule, scores: Tensor, trees: Sequence[DraftTree], keys: Sequence[NoiseKey | None]
) -> list[Acceptance]:
    """Run a rule over each sampled row, with probabilities in float64; greedy rows follow the argmax.

    Args:
        scores: `[rows + nodes, vocab]`, processed logits; per row its root's, then its nodes'.
        keys: of the rows, None for a greedy one.
    """
    emitted = sampling.argmax(scores).tolist()
    return [
        follow(tree, emitted[own]) if key is None else rule(tree, _target(scores[own], emitted[own]), PhiloxChance(key))
        for tree, own, key in zip(trees, _rows_of(trees), keys, strict=True)
    ]


def _rows_of(trees: Sequence[DraftTree]) -> list[slice]:
    """Return where the root and nodes of each tree lie in the scores of all."""
    return [slice(*ends) for ends in pairwise(accumulate((1 + len(tree) for tree in trees), initial=0))]


def follow(tree: DraftTree, emitted: Sequence[int]) -> Acceptance:
    """Follow the emitted tokens down the tree; `emitted[0]` is the root's, `emitted[1 + i]` node i's."""
    path, node, wanted = list[int](), ROOT, emitted[0]
    # A parent comes before its children, and siblings differ: one pass in order finds all of the path.
    for child, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        if parent == node and token == wanted != NO_TOKEN:
            path.append(child)
            node, wanted = child, emitted[1 + child]
    return Acceptance(tuple(path), wanted)


def _target(scores: Tensor, emitted: Sequence[int]) -> Callable[[int], Tensor | None]:
    """Return the function from a node to the target's distribution after it, None where no token can come."""

    def target(node: int) -> Tensor | None:
        return None if emitted[1 + node] == NO_TOKEN else torch.softmax(scores[1 + node].double(), -1)

    return target
