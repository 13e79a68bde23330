"""Bounds of a draft tree. Pure Python."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftShape:
    """Bounds of a draft tree, in the terms of EAGLE-2 (Li et al. 2024).

    Attributes:
        depth: most levels.
        branching: nodes expanded per depth, and children tried per node ("top-k").
        nodes: nodes kept for verification.
        min_reach: least probability, by the head, of reaching a level for which it is drafted; 0 drafts all levels.

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
        """Cache entries that a row needs behind its known tokens, for drafting or for verification."""
        return max(self.nodes, (self.depth - 1) * self.branching)
