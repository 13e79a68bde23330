"""The acceptance rules over a batch on the host: what runs where a kernel set has no walk of its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.kernels.reference.sampling import HostSampling, argmax
from specdec.kernels.types.draft_trees import DraftTrees, WalkMaker, at_once
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import NO_TOKEN, Acceptance, NoiseKey, NoiseRows, NoiseSource, Uniforms, Vector
from specdec.verify.chance import Chance, PhiloxChance
from specdec.verify.coupled import coupled_walk, follow

# An acceptance rule: a row's tree, the target's distribution after each node, coins and draws.
Rule = Callable[[DraftTree, Callable[[int], Vector | None], Chance], Acceptance]


def host_coupled_walk(noise: NoiseSource) -> WalkMaker:
    """Return the coupled rule as an operation of `KernelSet`."""
    sampling = HostSampling(noise)

    def walk(scores: Tensor, trees: DraftTrees, noise: NoiseRows) -> list[Acceptance]:
        return coupled_walk(sampling.gumbel_argmax, follow_all, scores, trees, noise)

    return at_once(walk)


def follow_all(emitted: Tensor, trees: DraftTrees) -> list[Acceptance]:
    """Follow the tokens emitted after roots and nodes; see `coupled_walk`."""
    tokens: list[int] = emitted.tolist()
    acceptances, start = [], 0
    for tree in trees.read():
        acceptances.append(follow(tree, tokens[start : start + 1 + len(tree)]))
        start += 1 + len(tree)
    return acceptances


def host_walk(rule: Rule, uniforms: Uniforms) -> WalkMaker:
    """Return a rule as an operation of `KernelSet`, on any device: scores and draft probabilities are read from it."""

    def walk(scores: Tensor, trees: DraftTrees, noise: NoiseRows) -> list[Acceptance]:
        return walk_rows(rule, scores.cpu(), [_on_host(tree) for tree in trees.with_probs()], noise.keys, uniforms)

    return at_once(walk)


def _on_host(tree: DraftTree) -> DraftTree:
    probs = tree.draft_probs
    return tree if probs is None or probs.is_cpu else replace(tree, draft_probs=probs.cpu(), check=False)


def walk_rows(
    rule: Rule, scores: Tensor, trees: Sequence[DraftTree], keys: Sequence[NoiseKey | None], uniforms: Uniforms
) -> list[Acceptance]:
    """Run a rule over each sampled row, with probabilities in float64; greedy rows follow the argmax.

    Args:
        scores: `[rows + nodes, vocab]`, processed logits; per row its root's, then its nodes'.
        keys: of the rows, None for a greedy one.
    """
    emitted = argmax(scores).tolist()
    acceptances, start = [], 0
    for tree, key in zip(trees, keys, strict=True):
        own = slice(start, start + 1 + len(tree))
        start = own.stop
        if key is None:
            acceptances.append(follow(tree, emitted[own]))
        else:
            target = _target(scores[own], emitted[own])
            acceptances.append(rule(tree, target, PhiloxChance(key, uniforms)))
    return acceptances


def _target(scores: Tensor, emitted: Sequence[int]) -> Callable[[int], Tensor | None]:
    """Return the function from a node to the target's distribution after it, None where no token can come."""

    def target(node: int) -> Tensor | None:
        return None if emitted[1 + node] == NO_TOKEN else torch.softmax(scores[1 + node].double(), -1)

    return target
