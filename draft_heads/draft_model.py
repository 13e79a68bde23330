"""A head with its output matrix, and what of a target both are loaded against."""

from typing import NamedTuple

from torch import Tensor

from specdec.draft_heads.draft_head import DraftHead
from specdec.draft_heads.head_description import TargetSizes
from specdec.draft_heads.readout import Readout
from specdec.kernels.linear import Projection


class DraftModel(NamedTuple):
    """What proposes tokens.

    Attributes:
        head: states from tokens.
        readout: scores from states.
    """

    head: DraftHead
    readout: Readout


class TargetParts(NamedTuple):
    """What a head may use of its target.

    Attributes:
        embedding: `[vocab_size, hidden_size]`.
        output: its output matrix as it serves.
        num_layers: of its decoder.
    """

    embedding: Tensor
    output: Projection
    num_layers: int

    @property
    def sizes(self) -> TargetSizes:
        vocab_size, hidden_size = self.embedding.shape
        return TargetSizes(vocab_size, hidden_size, self.num_layers)
