"""Movements of whole blocks that must happen before a step's forward pass."""

from enum import Enum
from typing import NamedTuple


class MoveKind(Enum):
    """Between which memories."""

    COPY = "copy"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"


class BlockMove(NamedTuple):
    """One block's content, target's, head's and features, goes from `source` to `target`.

    Attributes:
        source: a block of the host's memory for `SWAP_IN`, else of the device's.
        target: a block of the host's memory for `SWAP_OUT`, else of the device's.
    """

    kind: MoveKind
    source: int
    target: int
