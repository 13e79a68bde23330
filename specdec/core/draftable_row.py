"""A request as the choice of tree sizes sees it: how its drafts fared, and how large its tree may be. Pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Prior of a new request's history: predicted tokens, and the ratio of accepted ones. It is optimistic, because only
# drafting finds easy text, and a few trees show that a text is not easy.
PRIOR, HOPE = 2.0, 2.0
# Decay of the history from tree to tree, as text changes.
FADING = 0.9


@dataclass(slots=True)
class AcceptanceHistory:
    """Draft tokens of a request that were accepted, and those that its trees' sizes predicted."""

    accepted: float = HOPE * PRIOR
    predicted: float = PRIOR

    @property
    def ratio(self) -> float:
        """Acceptance relative to the average, starting from an optimistic prior."""
        return self.accepted / self.predicted

    def learn(self, accepted: int, predicted: float) -> None:
        """Add a tree."""
        self.accepted = FADING * self.accepted + accepted
        self.predicted = FADING * self.predicted + predicted


class DraftableRow(NamedTuple):
    """A row that can draft.

    Attributes:
        history: acceptance history of its request.
        nodes, depth: bounds of the tree that the draft model drafts; no nodes where it cannot draft.
        chains: values of the nodes of chains that the row may have, in descending order.
        share: share of the values of the model's nodes that the chains leave: where a chain is right, the model's nodes
            add nothing.
    """

    history: AcceptanceHistory
    nodes: int
    depth: int
    chains: Sequence[float] = ()
    share: float = 1.0
