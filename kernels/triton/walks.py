"""Verification by a device's kernels: the host waits once, for trees and outcome together."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.types import Acceptance, DraftProbs, NoiseColumns, NoiseRows, PackedTrees, Walk
from specdec.kernels.types.upload import upload


class DeviceWalks(NamedTuple):
    """Verification as operations of `KernelSet`, made of the Triton kernels or their references.

    Attributes:
        argmax: the argmax of each row's scores plus noise; see `specdec.kernels.triton.gumbel_argmax`.
        follow: `specdec.kernels.triton.tree_walk`.
        reject: `specdec.kernels.triton.rejection_walk`.
    """

    argmax: Callable[[Tensor, NoiseRows], Tensor]
    follow: Callable[[Tensor, PackedTrees], Walk]
    reject: Callable[[Tensor, DraftProbs | None, PackedTrees, NoiseColumns], Walk]

    def coupled_walk(self, scores: Tensor, trees: DraftTrees, noise: NoiseRows) -> list[Acceptance]:
        """See `Walks.coupled`."""
        emitted = self.argmax(scores, trees.noise(noise.keys, scores.device))
        return _read([self.follow(emitted, _packed(trees, emitted.device))], trees)

    def rejection_walk(self, scores: Tensor, trees: DraftTrees, noise: NoiseRows) -> list[Acceptance]:
        """See `Walks.rejection`.

        Rows whose children are weighed against q are walked apart from the others: a launch weighs all or none. A
        greedy row follows the argmax, whatever its children were drawn from.
        """

        def walk(scores: Tensor, trees: DraftTrees, noise: NoiseRows, weighed: bool) -> Walk:
            draft_probs = trees.draft_probs(scores.device) if weighed else None
            return self.reject(scores, draft_probs, _packed(trees, scores.device), noise.columns(scores.device))

        keys = noise.keys
        is_weighed = [drawn and key is not None for drawn, key in zip(trees.is_drawn, keys, strict=True)]
        if len(set(is_weighed)) == 1:
            return _read([walk(scores, trees, noise, is_weighed[0])], trees)
        parts = torch.split(scores, [1 + size for size in trees.sizes])
        order, walks = list[int](), list[Walk]()
        for weighed in (False, True):
            rows = [row for row, own in enumerate(is_weighed) if own == weighed]
            own = torch.cat([parts[row] for row in rows])
            walks.append(walk(own, trees.select(rows), NoiseRows([keys[row] for row in rows]), weighed))
            order += rows
        found = dict(zip(order, _read(walks, trees), strict=True))
        return [found[row] for row in range(len(keys))]


def _packed(trees: DraftTrees, device: torch.device) -> PackedTrees:
    """Return trees in the form in which the kernels take them."""
    nodes, starts = trees.nodes(device), upload([0, *accumulate(1 + size for size in trees.sizes)], device)
    return PackedTrees(nodes.tokens, nodes.parents, starts, max(trees.sizes), trees.depth)


def _read(walks: Sequence[Walk], trees: DraftTrees) -> list[Acceptance]:
    """Return the outcome of each row, walk after walk."""
    numbers = iter(trees.read_with([part for walk in walks for part in walk]))
    acceptances = []
    for paths, lengths, next_tokens in zip(numbers, numbers, numbers, strict=True):
        depth = len(paths) // len(lengths)
        for row, (length, token) in enumerate(zip(lengths, next_tokens, strict=True)):
            acceptances.append(Acceptance(tuple(paths[row * depth : row * depth + length]), token))
    return acceptances
