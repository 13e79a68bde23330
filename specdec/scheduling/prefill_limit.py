"""Limit of the prompt tokens that a step computes beside decoding rows. Pure Python."""

import sys
from dataclasses import dataclass

from specdec.scheduling.step_cost import StepCost

# Prompt tokens that every step may compute, whatever they cost.
LEAST = 16


@dataclass(frozen=True)
class PrefillLimit:
    """A bound on how much prompts delay outputs.

    Where a pass is bound by memory, prompt tokens are nearly free. Where it is bound by arithmetic, a chunk of 256
    beside 8 decoding rows takes as long as ten steps.

    Attributes:
        cost: seconds of a step's parts.
        stretch: limit of the time of a step with one prompt over its time without. Each further prompt adds as much
            as the first, so that steps get longer, and throughput higher, where many wait. 0 for no limit.
    """

    cost: StepCost
    stretch: float

    def tokens(self, prompts: int, decoding: int, nodes: int, trees: int, levels: int) -> int:
        """Return how many tokens of prompts a step may compute.

        Args:
            prompts: number of prompts, waiting or being prefilled.
            decoding: rows of one known token.
            nodes: nodes of each draft tree.
            trees: number of decoding rows that draft.
            levels: limit of the trees' levels.
        """
        if not self.stretch or not decoding:
            return sys.maxsize
        own = decoding + trees * nodes
        more = prompts * (self.stretch - 1) * self.cost.step(decoding, own, trees, levels)
        return max(LEAST, int(min(self.cost.prompt_tokens(more, own), sys.maxsize)))
