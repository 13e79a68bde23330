"""What a pass of the target yields."""

from typing import NamedTuple

from torch import Tensor


class TargetOutput(NamedTuple):
    """Of each packed row.

    Attributes:
        features: `[rows, hidden_size]` hidden states after the final norm: what lm_head and EAGLE-1/2 heads read.
        taps: `[rows, hidden_size]` each: the residual stream before the layers asked for, in their order.
    """

    features: Tensor
    taps: list[Tensor]
