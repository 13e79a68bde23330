"""Bounds of a draft tree. Pure Python."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.kernels.types.settings import check_settings, checked_keywords, setting


@checked_keywords()
@dataclass(frozen=True)
class DraftShape:
    """Bounds of a draft tree, in the terms of EAGLE-2 (Li et al. 2024).

    Raises:
        ValueError: a value outside its range; names the setting, the value and the range.
    """

    PANEL: ClassVar[str] = "Drafts"

    depth: int = setting(help="Most draft tokens in a row.", least=1, most=64, flags="--draft-depth")
    branching: int = setting(
        help="Nodes expanded per depth, and children tried per node.",
        least=1,
        most=64,
        flags="--draft-branching",
    )
    nodes: int = setting(help="Draft nodes verified per step.", least=1, most=1024, flags="--draft-nodes")
    min_reach: float = setting(
        0.0,
        "Draft a level deeper while the head's probability of reaching it is at least this; 0: always.",
        least=0,
        below=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def in_words(self) -> str:
        """Nodes and depth, as they stand beside a tau."""
        return f"{self.nodes} {'node' if self.nodes == 1 else 'nodes'}, depth {self.depth}"

    @property
    def slots(self) -> int:
        """Cache entries that a row needs behind its known tokens, for drafting or for verification."""
        return max(self.nodes, self.scratch(self.depth))

    @property
    def tokens(self) -> int:
        """Most tokens that a step brings: a path of its tree, and the target's own."""
        return self.depth + 1

    @property
    def slots_ahead(self) -> int:
        """`slots` of a row whose next tree is drafted before the host knows how many tokens this one brings."""
        return max(self.nodes, self.tokens + self.scratch(self.depth))

    @property
    def positions(self) -> int:
        """Rotary positions that drafting needs from the last known token's on."""
        return self.depth

    def scratch(self, depth: int) -> int:
        """Return the entries that drafting `depth` levels needs: of the nodes expanded at each level but the last."""
        return (depth - 1) * self.branching

    def depth_within(self, entries: int, depth: int) -> int:
        """Return how many levels can be drafted with this many entries, at most `depth`."""
        return depth if depth * self.branching <= entries else entries // self.branching + 1


@checked_keywords()
@dataclass(frozen=True)
class BlockShape(DraftShape):
    """Bounds of a tree whose levels are all drafted by one pass over a block of rows.

    Attributes:
        rows: rows of the block, which need an entry each, whatever the depth.
    """

    rows: int = setting(1, "Rows of a block.", least=1)

    @property
    def positions(self) -> int:
        return max(self.depth, self.rows)

    def scratch(self, depth: int) -> int:  # noqa: ARG002
        return self.rows

    def depth_within(self, entries: int, depth: int) -> int:
        return depth if self.rows <= entries else 0
