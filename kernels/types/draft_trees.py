"""Batches of draft trees, one per row: the value that flows from the drafter to packing, verification and read-back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.types.device_trees import Completion, DeviceTrees
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.ragged_rows import WORD_BITS
from specdec.kernels.types.tree import NO_DRAFTS, DraftTree, HostNodes, split_words
from specdec.kernels.types.types import (
    Acceptance,
    DraftedEntries,
    DraftProbs,
    NodeTensors,
    NoiseKey,
    NoiseRows,
    TokenTargets,
    Walk,
)
from specdec.kernels.types.upload import Download, Packet, upload


class HostTrees:
    """Trees on the host. `DeviceTrees` has the same methods.

    Two forms exist because lists are faster on a CPU, most of all at one row: growing, packing and reading a tree of
    8 nodes takes 0.1 ms as `HostTrees` and 0.3 ms as `DeviceTrees`, where a step takes about 3 ms.

    Attributes:
        sizes: nodes of each tree.
        depth: at least the depth of the deepest node.
        is_drawn: of each tree, whether its children were drawn from known distributions.
    """

    def __init__(self, trees: Sequence[DraftTree]) -> None:
        self.trees = trees
        # Of its tokens: a call of Python less for each row of a step.
        self.sizes = [len(tree.tokens) for tree in trees]

    @staticmethod
    def empty(rows: int) -> "HostTrees":
        """Return a batch without drafts."""
        return HostTrees([NO_DRAFTS] * rows)

    @property
    def depth(self) -> int:
        return max((max(tree.depths, default=0) for tree in self.trees), default=0)

    @property
    def is_drawn(self) -> list[bool]:
        return [tree.draft_probs is not None for tree in self.trees]

    def select(self, rows: Sequence[int | None]) -> "HostTrees":
        """Return the trees of these rows, in this order; None stands for an empty tree."""
        return HostTrees([NO_DRAFTS if row is None else self.trees[row] for row in rows])

    def concat(self, others: "HostTrees") -> "HostTrees":
        """Return these trees, followed by others of the same form."""
        return HostTrees([*self.trees, *others.trees])

    def host_nodes(self, row: int) -> HostNodes:
        """Return the nodes of a row's tree."""
        tree = self.trees[row]
        return HostNodes(tree.tokens, tree.depths, tree.ancestors)

    def completion(self, places: Sequence[int], packet: Packet) -> Completion | None:  # noqa: ARG002
        """Return what writes into a packed batch what only the device knows of the nodes; here there is nothing.

        Args:
            places: packed rows of all nodes, tree after tree.
            packet: takes what the function needs, which may be called once it is sent.
        """
        return None

    def nodes(self, packet: Packet) -> Callable[[], NodeTensors]:
        """Return what returns all nodes, tree after tree, once the packet is sent."""
        words = max(1, ceil_div(max(self.sizes, default=0), WORD_BITS))
        trees = self.trees
        tokens, depths, parents, ancestors = packet.add_lists(
            [token for tree in trees for token in tree.tokens],
            [depth for tree in trees for depth in tree.depths],
            [parent for tree in trees for parent in tree.parents],
            [word for tree in trees for bits in tree.ancestors for word in split_words(bits, words)],
        )
        found = NodeTensors(tokens, depths, parents, ancestors.view(-1, words))
        return lambda: found

    def paths(self, row: int, device: torch.device) -> Tensor:
        """Return the tokens on the way to the root and to each node of a row's tree, padded with -1.

        Returns:
            int64 `[1 + nodes, depth]`.
        """
        return upload(self.trees[row].path_tokens, device)

    def draft_probs(self, device: torch.device) -> DraftProbs:
        """Return what the children of all roots and nodes were drawn from; all trees must be drawn."""
        tables = [tree.draft_probs for tree in self.trees if tree.draft_probs is not None]
        table = torch.cat(tables).to(device, torch.float32)
        return DraftProbs(table, torch.arange(len(table), device=device))

    def noise(self, keys: Sequence[NoiseKey | None], packet: Packet) -> Callable[[], NoiseRows]:
        """Return what returns the noise of each root and node, once the packet is sent: that of the position after it.

        Args:
            keys: key of each row's root; None for a greedy row.
        """
        rows: list[NoiseKey | None] = []
        for tree, key in zip(self.trees, keys, strict=True):
            rows += [key and key._replace(position=key.position + depth) for depth in (0, *tree.depths)]
        found = NoiseRows(rows).send_with(packet)
        return lambda: found

    def with_probs(self) -> Sequence[DraftTree]:
        """Return the trees on the host as `read` does, drawn ones with what they were drawn from."""
        return self.trees

    def read(self) -> Sequence[DraftTree]:
        """Return the trees on the host, which may have to wait for them."""
        return self.trees

    def begin_read(self, parts: Sequence[Tensor]) -> Callable[[], list[list[int]]]:
        """Return what returns the numbers of each tensor; what `read` needs comes in the same transfer.

        Args:
            parts: int64, on the trees' device.
        """
        return Download(parts).read


class WalkOutcome(NamedTuple):
    """The outcome of verifying a batch of trees, which a device may still be computing.

    Attributes:
        read: returns the outcome of each row; the host may wait for a device.
        walk: of all rows in order, on the device; None where the host walked the trees, or there were none.
        next_tokens: int64 `[rows]`, on the device: the target's own token of each row; None where the host has it.
    """

    read: Callable[[], list[Acceptance]]
    walk: Walk | None = None
    next_tokens: Tensor | None = None


# A batch of draft trees, one per row.
DraftTrees = HostTrees | DeviceTrees
# An acceptance rule over a batch: (processed logits `[rows + nodes, vocab]`, trees, each row's noise at its root).
BatchWalk = Callable[[Tensor, DraftTrees, NoiseRows], list[Acceptance]]
# The rule for given trees and noise: of the logits.
PreparedWalk = Callable[[Tensor], WalkOutcome]
# What prepares a rule, before the logits are there. It may be called once the packet is sent.
WalkMaker = Callable[[DraftTrees, NoiseRows, Packet], PreparedWalk]


def at_once(walk: BatchWalk) -> WalkMaker:
    """Return a rule on the host as what prepares it; there is nothing to send, and no walk on a device."""

    def prepare(trees: DraftTrees, noise: NoiseRows, packet: Packet) -> PreparedWalk:  # noqa: ARG001
        def walked(scores: Tensor) -> WalkOutcome:
            found = walk(scores, trees, noise)
            return WalkOutcome(lambda: found)

        return walked

    return prepare


@dataclass(frozen=True)
class Walks:
    """Acceptance rules of a kernel set; None where the rule's text in `verify/` runs on the host.

    Attributes:
        coupled: the path of each row's tree along the tokens that the target emits: of a root or node, the argmax of
            its scores plus the noise of its output position (arguments: processed logits `[rows + nodes, vocab]`, which
            are not to be used afterwards, trees, and each row's noise at its root, None for a greedy row). The lowest
            id on ties; `NO_TOKEN`, which ends the path, where the largest is not finite. The host waits for the
            outcome.
        rejection: recursive rejection sampling down each row's tree, with the same arguments; a greedy row follows the
            argmax.
        commit: what follows a walk that stays on the device; see `specdec.kernels.triton.accepted`.
    """

    coupled: WalkMaker | None = None
    rejection: WalkMaker | None = None
    commit: Callable[[Walk, DraftedEntries, Sequence[TokenTargets]], None] | None = None
