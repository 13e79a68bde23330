"""How many tokens of prompts a step takes in beside rows that decode. Pure Python."""

import sys
from dataclasses import dataclass

from specdec.scheduling.step_cost import StepCost

# Prompts go on by at least so many, whatever they cost.
LEAST = 16


@dataclass(frozen=True)
class PrefillLimit:
    """Keeps prompts from making others wait: where a pass is bound by memory they are nearly free, where it is bound
    by arithmetic a chunk of 256 beside 8 decoding rows is ten steps in one.

    Attributes:
        cost: seconds of a step's parts.
        stretch: most seconds of a step with a prompt over those of the step without; each prompt more adds as much
            as the first, so that where many wait the steps are as long as throughput wants them. 0 for no limit.
    """

    cost: StepCost
    stretch: float

    def tokens(self, prompts: int, decoding: int, nodes: int, trees: int, levels: int) -> int:
        """Tokens of prompts for a step.

        Args:
            prompts: under way and waiting.
            decoding: rows that have one token each.
            nodes: of each draft tree.
            trees: of these, rows that draft.
            levels: of their trees.
        """
        if not self.stretch or not decoding:
            return sys.maxsize
        own = decoding + trees * nodes
        more = prompts * (self.stretch - 1) * self.cost.step(decoding, own, trees, levels)
        return max(LEAST, int(min(self.cost.prompt_tokens(more, own), sys.maxsize)))
