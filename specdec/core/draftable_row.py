"""A request as the choice of tree sizes sees it: how its drafts fared, and how large its tree may be. Pure Python."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Predicted tokens that a new request's history begins with, as many of them accepted: a few trees tell little. Optimism
# instead would cost every batch of new requests several steps in vain.
PRIOR = 8.0
# Decay of the history from tree to tree, as text changes.
FADING = 0.97


@dataclass(slots=True)
class AcceptanceHistory:
    """Draft tokens of a request that were accepted, and those that its trees' sizes predicted."""

    accepted: float = PRIOR
    predicted: float = PRIOR

    @property
    def ratio(self) -> float:
        """Acceptance relative to the average, which it starts from."""
        return self.accepted / self.predicted

    def learn(self, accepted: int, predicted: float) -> None:
        """Add a tree."""
        self.accepted = FADING * self.accepted + accepted
        self.predicted = FADING * self.predicted + predicted


class Ahead(NamedTuple):
    """Tokens ahead of a row.

    Attributes:
        unread: known tokens that the draft head has not read, which it must before it drafts.
        left: limit of the tokens that may still follow.
    """

    unread: int = 0
    left: int = sys.maxsize


class DraftableRow(NamedTuple):
    """A row that can draft.

    Attributes:
        history: acceptance history of its request.
        nodes, depth: bounds of the tree that the draft model drafts; no nodes where it cannot draft.
        chains: values of the nodes of chains that the row may have, in descending order.
        share: share of the values of the model's nodes that the chains leave: where a chain is right, the model's nodes
            add nothing.
        ahead: tells what the row has ahead of it now.
    """

    history: AcceptanceHistory
    nodes: int
    depth: int
    chains: Sequence[float] = ()
    share: float = 1.0
    ahead: Callable[[], Ahead] = Ahead
