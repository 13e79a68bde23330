"""Bounds of a draft tree. Pure Python."""

from dataclasses import dataclass
from typing import ClassVar

from specdec.kernels.settings import check_settings, checked_keywords, setting


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
        "Draft a level deeper while the chance to get there, as the head sees it, is at least this; 0: always.",
        least=0,
        below=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def slots(self) -> int:
        """Cache entries that a row needs behind its known tokens, for drafting or for verification."""
        return max(self.nodes, (self.depth - 1) * self.branching)
