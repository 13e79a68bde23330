"""How a request's drafts have fared beside those of all others. Pure Python."""

from dataclasses import dataclass

# Tokens that a new request counts as having been foretold, and how many of them as accepted: text that is easier than
# most is found by those who look for it, and a few trees are enough to see that it is not.
PRIOR, HOPE = 2.0, 2.0
# How trees fade, from one to the next: text changes.
FADING = 0.9


@dataclass
class DraftRecord:
    """Drafted tokens that were accepted, and those that were to be expected of trees of such sizes."""

    accepted: float = HOPE * PRIOR
    foretold: float = PRIOR

    @property
    def ratio(self) -> float:
        """How many times the foretold tokens this request's trees bring."""
        return self.accepted / self.foretold

    def learn(self, accepted: int, foretold: float) -> None:
        """Take in a tree."""
        self.accepted = FADING * self.accepted + accepted
        self.foretold = FADING * self.foretold + foretold
