"""The acceptance rule: which draft tokens the target would have said itself."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.verify.noise import GumbelNoise
from specdec.verify.sampling import Sampling, processed_log_probs
from specdec.verify.tree import ROOT, DraftTree


class Acceptance(NamedTuple):
    """What a sampled row's step yields: the tokens of `path`, then `next_token`.

    Attributes:
        path: accepted nodes from the root's child downwards.
        next_token: the target's own token after them.
    """

    path: tuple[int, ...]
    next_token: int


class SampledRow(NamedTuple):
    """A row to verify.

    Attributes:
        tree: its draft nodes.
        position: output position of the token after the root.
    """

    tree: DraftTree
    sampling: Sampling
    position: int


class CoupledVerifier:
    """Gumbel-max coupling: each output position has its own noise, shared by everything that samples there.

    The token emitted after a node is `argmax_v log p(v) + G_t(v)`, an exact sample from p; at temperature 0,
    `argmax_v` of the logits, lowest id on ties. The walk follows the child that carries it, and ends where
    there is none. The result is a function of p and the seed, whatever the tree (Daliri et al. 2024).
    """

    def __init__(self, noise: GumbelNoise) -> None:
        self.noise = noise

    def verify(self, rows: Sequence[SampledRow], logits: Tensor) -> list[Acceptance]:
        """Walk every row's tree.

        Args:
            rows: the sampled rows.
            logits: `[sum of (1 + nodes), vocab]`, per row its root, then its nodes.
        """
        emitted = self.emitted_tokens(rows, logits).tolist()
        acceptances, start = [], 0
        for row in rows:
            acceptances.append(walk(row.tree, emitted[start : start + 1 + len(row.tree)]))
            start += 1 + len(row.tree)
        return acceptances

    def emitted_tokens(self, rows: Sequence[SampledRow], logits: Tensor) -> Tensor:
        """int64 `[sum of (1 + nodes)]`: the token that the target emits after each root and node."""
        if all(row.sampling.is_greedy for row in rows):
            return argmax(logits)
        samplings = [row.sampling for row in rows for _ in range(1 + len(row.tree))]
        scores = processed_log_probs(logits, samplings)
        start = 0
        for row in rows:
            count = 1 + len(row.tree)
            if not row.sampling.is_greedy:
                depths = [0, *row.tree.depths]
                vectors = self.noise_vectors(row.sampling, row.position, max(depths) + 1)
                scores[start : start + count] += vectors[depths]
            start += count
        greedy = torch.tensor([s.is_greedy for s in samplings], device=logits.device)
        return torch.where(greedy, argmax(logits), argmax(scores))

    def noise_vectors(self, sampling: Sampling, position: int, count: int) -> Tensor:
        """float32 `[count, vocab]`: the noise of `count` output positions from `position` on."""
        key = (sampling.seed, sampling.sample_index)
        return torch.stack([self.noise.at(*key, position + depth) for depth in range(count)])


def argmax(scores: Tensor) -> Tensor:
    """int64 `[rows]`, the lowest id on ties. Below float32, torch's own argmax takes several times as long."""
    return scores.max(-1).indices


def walk(tree: DraftTree, emitted: Sequence[int]) -> Acceptance:
    """Follow the emitted tokens down the tree; `emitted[0]` is the root's, `emitted[1 + i]` node i's."""
    path: list[int] = []
    node = ROOT
    while (child := tree.children.get((node, emitted[1 + node]))) is not None:
        path.append(child)
        node = child
    return Acceptance(tuple(path), emitted[1 + node])
