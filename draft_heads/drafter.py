"""What the engine asks of whoever proposes draft trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from torch import Tensor

from specdec.verify.sampling import Context
from specdec.verify.tree import DraftTree


@dataclass(frozen=True)
class DraftShape:
    """Bounds of a draft tree, in the terms of EAGLE-2 (Li et al. 2024).

    Attributes:
        depth: most draft tokens in a row.
        branching: nodes expanded per depth, and children tried per node ("top-k").
        nodes: nodes kept for verification.
        min_reach: drafting goes a level deeper while the chance of getting there, as the head sees it, is at
            least this; 0 for always.

    Raises:
        ValueError: a number below 1, more nodes than one step can have, or no chance between 0 and 1.
    """

    depth: int
    branching: int
    nodes: int
    min_reach: float = 0.0

    def __post_init__(self) -> None:
        for name in ("depth", "branching", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name, most in (("depth", 64), ("branching", 64), ("nodes", 1024)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at most {most}")

        if not 0 <= self.min_reach < 1:
            raise ValueError(f"min_reach is {self.min_reach}; it must be at least 0 and below 1")

    @property
    def slots(self) -> int:
        """Cache entries that a row needs behind its known tokens, while drafting or while verifying."""
        return max(self.nodes, (self.depth - 1) * self.branching)


class Proposal(StrEnum):
    """How a tree's tokens are chosen at temperature > 0; at 0 it is always the likeliest.

    Attributes:
        COUPLED: the likeliest after adding the position's own noise to log q: for `CoupledVerifier`.
        LIKELIEST: the head's likeliest, as EAGLE-2 does.
        DRAWN: drawn from q without replacement, and q handed on with the tree: for rejection rules.
    """

    COUPLED = "coupled"
    LIKELIEST = "likeliest"
    DRAWN = "drawn"


class DraftRow(NamedTuple):
    """A row of the coming step, as a drafter sees it.

    Attributes:
        request_id: key of what the drafter remembers.
        block_table: enough blocks for `len(token_ids) + DraftShape.slots` entries where nodes are asked.
        num_nodes: most nodes wanted, 0 for none.
        max_depth: no node deeper than this can be emitted any more.
        context: how the request samples, and what it has said; at temperature > 0 drafts follow its noise.
    """

    request_id: str
    block_table: Sequence[int]
    num_nodes: int
    max_depth: int
    context: Context

    @property
    def token_ids(self) -> Sequence[int]:
        """All known tokens; the last one is the tree's root."""
        return self.context.token_ids


class Drafter(Protocol):
    """Proposes trees, and learns from each step what came of them."""

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One tree per row, of at most `num_nodes` nodes and `max_depth` levels."""
        ...

    def observe(self, request_id: str, start: int, features: Tensor) -> None:
        """The target's features `[tokens, hidden_size]` of known tokens `start, start + 1, ...`, now cached."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended or lost its cache."""
        ...


class NoDrafter:
    """Plain decoding."""

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        return [DraftTree()] * len(rows)

    def observe(self, request_id: str, start: int, features: Tensor) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass
