"""Verification by a device's kernels: the host waits once, for trees and outcome together."""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.types.draft_trees import DraftTrees, PreparedWalk, WalkOutcome
from specdec.kernels.types.types import Acceptance, DraftProbs, NoiseColumns, NoiseRows, PackedTrees, Walk
from specdec.kernels.types.upload import Packet


class DeviceWalks(NamedTuple):
    """Verification as operations of `KernelSet`, made of the Triton kernels or their references.

    Attributes:
        argmax: the argmax of each row's scores plus noise; see `specdec.kernels.triton.gumbel_argmax`.
        follow: `specdec.kernels.triton.coupled_walk`.
        reject: `specdec.kernels.triton.rejection_walk`.
    """

    argmax: Callable[[Tensor, NoiseColumns], Tensor]
    follow: Callable[[Tensor, PackedTrees, NoiseColumns], Walk]
    reject: Callable[[Tensor, DraftProbs | None, PackedTrees, NoiseColumns], Walk]

    def coupled_walk(self, trees: DraftTrees, noise: NoiseRows, packet: Packet) -> PreparedWalk:
        """See `Walks.coupled`."""
        own = trees.noise(noise.keys, packet)
        if any(trees.sizes):
            packed = _packed(trees, packet)
            return lambda scores: outcome_of(self.follow(scores, packed(), own().columns(scores.device)), trees)

        def plain(scores: Tensor) -> WalkOutcome:
            tokens = self.argmax(scores, own().columns(scores.device))
            read = trees.begin_read([tokens])
            return WalkOutcome(lambda: [Acceptance((), token) for token in read()[0]], next_tokens=tokens)

        return plain

    def rejection_walk(self, trees: DraftTrees, noise: NoiseRows, packet: Packet) -> PreparedWalk:
        """See `Walks.rejection`.

        Rows whose children are weighed against q are walked apart from the others: a launch weighs all or none. A
        greedy row follows the argmax, whatever its children were drawn from.
        """

        def prepared(trees: DraftTrees, noise: NoiseRows, weighed: bool) -> Callable[[Tensor], Walk]:
            packed, own = _packed(trees, packet), noise.send_with(packet)

            def walk(scores: Tensor) -> Walk:
                draft_probs = trees.draft_probs(scores.device) if weighed else None
                return self.reject(scores, draft_probs, packed(), own.columns(scores.device))

            return walk

        keys = noise.keys
        is_weighed = [drawn and key is not None for drawn, key in zip(trees.is_drawn, keys, strict=True)]
        if len(set(is_weighed)) == 1:
            walk = prepared(trees, noise, is_weighed[0])
            return lambda scores: outcome_of(walk(scores), trees)
        groups = [[row for row, own in enumerate(is_weighed) if own == weighed] for weighed in (False, True)]
        walks = [
            prepared(trees.select(rows), NoiseRows([keys[row] for row in rows]), weighed)
            for rows, weighed in zip(groups, (False, True), strict=True)
        ]
        both = [*groups[0], *groups[1]]
        places = packet.add([both.index(row) for row in range(len(keys))])

        def walk_groups(scores: Tensor) -> WalkOutcome:
            parts = torch.split(scores, [1 + size for size in trees.sizes])
            made = [walk(torch.cat([parts[row] for row in rows])) for walk, rows in zip(walks, groups, strict=True)]
            # As deep as the deepest tree of either group.
            depth = max(walk.paths.shape[1] for walk in made)
            deep = [walk._replace(paths=pad(walk.paths, (0, depth - walk.paths.shape[1]), value=-1)) for walk in made]
            whole = (torch.cat(part).index_select(0, places) for part in zip(*deep, strict=True))
            return outcome_of(Walk(*whole), trees)

        return walk_groups


def _packed(trees: DraftTrees, packet: Packet) -> Callable[[], PackedTrees]:
    """Return what returns trees in the form in which the kernels take them."""
    chosen, starts = trees.nodes(packet), packet.add([0, *accumulate(1 + size for size in trees.sizes)])

    def packed() -> PackedTrees:
        nodes = chosen()
        return PackedTrees(nodes.tokens, nodes.parents, starts, max(trees.sizes), trees.depth)

    return packed


def outcome_of(walk: Walk, trees: DraftTrees) -> WalkOutcome:
    """Return the outcome of a walk over trees, and begin to send it to the host."""
    read = trees.begin_read(walk)

    def acceptances() -> list[Acceptance]:
        paths, lengths, next_tokens = read()
        depth = len(paths) // len(lengths)
        return [
            Acceptance(tuple(paths[row * depth : row * depth + length]), token)
            for row, (length, token) in enumerate(zip(lengths, next_tokens, strict=True))
        ]

    return WalkOutcome(acceptances, walk, walk.next_tokens)
