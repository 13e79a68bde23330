"""Acceptance rules that weigh p against q: one walk per request, over probabilities in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.kernels.host_sampling import argmax
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types import NO_TOKEN, Acceptance
from specdec.verify.chance import Chance, PhiloxChance
from specdec.verify.transforms import processed_logits
from specdec.verify.tree import ROOT, DraftTree
from specdec.verify.verifier import SampledRow, walk

Walk = Callable[[DraftTree, Callable[[int], Tensor], Chance], Acceptance]


class WalkVerifier:
    """Runs `walk_rejection` or `walk_block` over each sampled row; greedy rows follow the argmax.

    The output follows the target's distribution exactly, but other than with `CoupledVerifier` it depends on the
    tree which of the possible outputs it is.
    """

    def __init__(self, walk_row: Walk, kernels: KernelSet) -> None:
        self.walk_row, self.kernels = walk_row, kernels

    def verify(self, rows: Sequence[SampledRow], logits: Tensor) -> list[Acceptance]:
        scores = processed_logits(logits, [row.nodes(logits.device) for row in rows], self.kernels)
        emitted = argmax(scores).tolist()
        acceptances, start = [], 0
        for row in rows:
            part = slice(start, start + 1 + len(row.tree))
            start = part.stop
            if row.context.sampling.is_greedy:
                acceptances.append(walk(row.tree, emitted[part]))
            else:
                acceptances.append(self._sample(row, scores[part], emitted[part]))
        return acceptances

    def _sample(self, row: SampledRow, scores: Tensor, emitted: Sequence[int]) -> Acceptance:
        sampling, tree = row.context.sampling, row.tree
        nodes: Sequence[int] = range(len(tree))
        lawless = {node for node in range(ROOT, len(tree)) if emitted[1 + node] == NO_TOKEN}
        if lawless:
            # Nothing below such a node can be weighed. The node itself stays in the tree: whether it does must
            # not hang on its own draw.
            tree, nodes = tree.without_below(lawless)

        def target(node: int) -> Tensor:
            own = ROOT if node == ROOT else nodes[node]
            p = torch.softmax(scores[1 + own].double(), -1)
            return torch.ones_like(p) if own in lawless else p

        chance = PhiloxChance(sampling.seed, sampling.sample_index, row.context.num_output)
        found = self.walk_row(tree, target, chance)
        path = tuple(nodes[node] for node in found.path)
        last = path[-1] if path else ROOT
        return Acceptance(path, NO_TOKEN if last in lawless else found.next_token)
