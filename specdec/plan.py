"""What the scheduler has decided about the coming step."""

from dataclasses import dataclass, field

from specdec.block_move import BlockMove
from specdec.request import Request


@dataclass(slots=True)
class PlannedRow:
    """A request's part of the coming step.

    Attributes:
        num_known: tokens of its chain, `token_ids[num_cached : num_cached + num_known]`.
        sampled: whether the chain reaches the last known token, after which one is sampled.
        read_to: known tokens that the draft head shall have read.
        num_nodes: most draft nodes under the chain's end.
        max_depth: levels of them that could still be emitted and have a place in the cache.
    """

    request: Request
    num_known: int
    sampled: bool
    read_to: int = 0
    num_nodes: int = 0
    max_depth: int = 0


@dataclass(slots=True)
class Plan:
    """Rows of a step, and what must be moved in the cache, in order, before its forward pass."""

    rows: list[PlannedRow] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)
