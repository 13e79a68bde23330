"""The acceptance rules over a batch on the host: what runs where a kernel set has no walk of its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specdec.kernels.reference.noise import GumbelNoise
from specdec.kernels.reference.sampling import HostSampling, argmax
from specdec.kernels.types.draft_trees import DraftTrees, WalkMaker, at_once
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import NO_TOKEN, Acceptance, NoiseKey, NoiseRows, Vector
from specdec.kernels.types.upload import Packet
from specdec.verify.chance import Chance, PhiloxChance
from specdec.verify.coupled import follow

# An acceptance rule: a row's tree, the target's distribution after each node, coins and draws.
Rule = Callable[[DraftTree, Callable[[int], Vector | None], Chance], Acceptance]


def host_coupled_walk(noise: GumbelNoise) -> WalkMaker:
    """Return the coupled rule as an operation of `KernelSet`."""
    return at_once(partial(coupled_walk, HostSampling(noise).gumbel_argmax))


def coupled_walk(
    argmax: Callable[[Tensor, NoiseRows], Tensor], scores: Tensor, trees: DraftTrees, noise: NoiseRows
) -> list[Acceptance]:
    """Follow the token emitted after each node down its row's tree; see `Walks.coupled`.

    Args:
        argmax: the argmax of scores `[rows, vocab]` plus each row's noise, int64 `[rows]`: a sample of their softmax.
            The lowest id on ties, `NO_TOKEN` where the largest is not finite. It may overwrite scores of rows with
            noise.
    """
    packet = Packet(scores.device)
    own = trees.noise(noise.keys, packet)
    packet.send()
    tokens: list[int] = argmax(scores, own()).tolist()
    acceptances, start = [], 0
    for tree in trees.read():
        acceptances.append(follow(tree, tokens[start : start + 1 + len(tree)]))
        start += 1 + len(tree)
    return acceptances


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
    emitted = argmax(scores).tolist()
    acceptances, start = [], 0
    for tree, key in zip(trees, keys, strict=True):
        own = slice(start, start + 1 + len(tree))
        start = own.stop
        if key is None:
            acceptances.append(follow(tree, emitted[own]))
        else:
            acceptances.append(rule(tree, _target(scores[own], emitted[own]), PhiloxChance(key)))
    return acceptances


def _target(scores: Tensor, emitted: Sequence[int]) -> Callable[[int], Tensor | None]:
    """Return the function from a node to the target's distribution after it, None where no token can come."""

    def target(node: int) -> Tensor | None:
        return None if emitted[1 + node] == NO_TOKEN else torch.softmax(scores[1 + node].double(), -1)

    return target
