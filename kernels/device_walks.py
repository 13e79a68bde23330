"""Verification by a device's kernels: the host waits once, for trees and outcome together."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.types import Acceptance, NoiseRows, Trees, Walk
from specdec.kernels.upload import upload


class DeviceWalks(NamedTuple):
    """Verification as operations of `KernelSet`, made of kernels with the arguments of the Triton ones.

    Attributes:
        follow: `specdec.kernels.tree_walk`.
        reject: `specdec.kernels.rejection_walk`.
        judge: `specdec.kernels.block_walk`.
    """

    follow: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Walk]
    reject: Callable[..., Walk]
    judge: Callable[..., Walk]

    def tree_walk(self, emitted: Tensor, trees: Trees) -> list[Acceptance]:
        """See `KernelSet.tree_walk`."""
        nodes = trees.nodes(emitted.device)
        starts, most = _starts(trees, emitted.device), max(trees.sizes)
        return _read([self.follow(emitted, nodes.tokens, nodes.parents, starts, most, trees.depth)], trees)

    def rejection_walk(self, scores: Tensor, trees: Trees, noise: NoiseRows) -> list[Acceptance]:
        """See `KernelSet.rejection_walk`."""

        def walk(scores: Tensor, trees: Trees, noise: NoiseRows, *, weighed: bool) -> Walk:
            device = scores.device
            probs, nodes = trees.draft_probs(device) if weighed else None, trees.nodes(device)
            columns, bounds = noise.columns(device), (max(trees.sizes), trees.depth)
            return self.reject(scores, probs, nodes.tokens, nodes.parents, _starts(trees, device), *columns, *bounds)

        return _walk_apart(walk, scores, trees, noise)

    def block_walk(self, scores: Tensor, trees: Trees, noise: NoiseRows) -> list[Acceptance]:
        """See `KernelSet.block_walk`."""

        def walk(scores: Tensor, trees: Trees, noise: NoiseRows, *, weighed: bool) -> Walk:
            device = scores.device
            nodes, starts, columns = trees.nodes(device), _starts(trees, device), noise.columns(device)
            if weighed:
                return self.judge(scores, trees.draft_probs(device), nodes.tokens, starts, *columns[:3], trees.depth)
            for size, key in zip(trees.sizes, noise.keys, strict=True):
                if size and key is not None:
                    raise ValueError(f"a chain of {size} tokens without draft_probs; block verification needs them")
            bounds = (max(trees.sizes), trees.depth)
            return self.reject(scores, None, nodes.tokens, nodes.parents, starts, *columns, *bounds)

        return _walk_apart(walk, scores, trees, noise)


def _walk_apart(walk: Callable[..., Walk], scores: Tensor, trees: Trees, noise: NoiseRows) -> list[Acceptance]:
    """Walk rows whose children are weighed against q apart from the others: a launch weighs all or none.

    A greedy row follows the argmax, whatever its children were drawn from.
    """
    keys = noise.keys
    is_weighed = [drawn and key is not None for drawn, key in zip(trees.is_drawn, keys, strict=True)]
    if len(set(is_weighed)) == 1:
        return _read([walk(scores, trees, noise, weighed=is_weighed[0])], trees)
    parts = torch.split(scores, [1 + size for size in trees.sizes])
    order, walks = list[int](), list[Walk]()
    for weighed in (False, True):
        rows = [row for row, own in enumerate(is_weighed) if own == weighed]
        own = torch.cat([parts[row] for row in rows])
        walks.append(walk(own, trees.select(rows), NoiseRows([keys[row] for row in rows]), weighed=weighed))
        order += rows
    found = dict(zip(order, _read(walks, trees), strict=True))
    return [found[row] for row in range(len(keys))]


def _starts(trees: Trees, device: torch.device) -> Tensor:
    """Return where each row's root and nodes begin, and the end, int64 `[rows + 1]`."""
    return upload([0, *accumulate(1 + size for size in trees.sizes)], device)


def _read(walks: Sequence[Walk], trees: Trees) -> list[Acceptance]:
    """Return the outcome of each row, walk after walk."""
    numbers = iter(trees.read_with([part for walk in walks for part in walk]))
    acceptances = []
    for paths, lengths, next_tokens in zip(numbers, numbers, numbers, strict=True):
        depth = len(paths) // len(lengths)
        for row, (length, token) in enumerate(zip(lengths, next_tokens, strict=True)):
            acceptances.append(Acceptance(tuple(paths[row * depth : row * depth + length]), token))
    return acceptances
