"""Acceptance rules that weigh p against q: one walk per request, over probabilities in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.verify.chance import Chance, PhiloxChance
from specdec.verify.transforms import processed_logits
from specdec.verify.tree import DraftTree
from specdec.verify.verifier import NO_TOKEN, Acceptance, SampledRow, argmax, walk

Walk = Callable[[DraftTree, Callable[[int], Tensor], Chance], Acceptance]


class WalkVerifier:
    """Runs `walk_rejection` or `walk_block` over each sampled row; greedy rows follow the argmax.

    The output follows the target's distribution exactly, but other than with `CoupledVerifier` it depends on the
    tree which of the possible outputs it is.
    """

    def __init__(self, walk_row: Walk) -> None:
        self.walk_row = walk_row

    def verify(self, rows: Sequence[SampledRow], logits: Tensor) -> list[Acceptance]:
        scores = processed_logits(logits, [row.nodes for row in rows])
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
        # No draft is weighed against a row that is no distribution: a plain step, and the next one meets the row.
        if NO_TOKEN in emitted:
            if emitted[0] == NO_TOKEN:
                return Acceptance((), NO_TOKEN)
            row, scores = SampledRow(DraftTree(), row.context), scores[:1]
        sampling = row.context.sampling
        probs = torch.softmax(scores.double(), -1)
        chance = PhiloxChance(sampling.seed, sampling.sample_index, row.context.num_output)
        return self.walk_row(row.tree, lambda node: probs[1 + node], chance)
