"""Trees of the coming step, which a device drafts behind the verification of this one, before the host knows it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.kernels.types.types import Acceptance


class LoopAhead(NamedTuple):
    """The candidates of some rows' trees.

    Attributes:
        places: of the rows among those that were drafted for.
        drawn: whether the trees are drawn.
        grown: what the loop over levels has returned, valid until the device runs another graph.
    """

    places: Sequence[int]
    drawn: bool
    grown: Any


class DraftsAhead:
    """Candidates for the trees of the coming step. How large these are is decided with it.

    The tokens are those that the step before brings, so they are of use to the step after it alone, and to rows that
    have just these tokens then.

    Args:
        rows: the rows of the step before.
    """

    def __init__(self, rows: Sequence[DraftRow], loops: Sequence[LoopAhead]) -> None:
        self.loops = loops
        self._rows = [(row.token_ids, len(row.token_ids)) for row in rows]
        self._known: dict[int, tuple[int, int]] = {}

    def learn(self, acceptances: Sequence[Acceptance]) -> None:
        """Learn what the step has brought to each row."""
        for place, ((tokens, known), outcome) in enumerate(zip(self._rows, acceptances, strict=True)):
            self._known[id(tokens)] = place, known + len(outcome.path) + 1

    def places_of(self, rows: Sequence[DraftRow]) -> dict[int, int]:
        """Return the places here of rows that ask for a tree and have one."""
        places = {}
        for i, row in enumerate(rows):
            place, known = self._known.get(id(row.token_ids), (0, 0))
            if row.drafts and known == len(row.token_ids) and row.num_draft_cached >= self._rows[place][1]:
                places[i] = place
        return places
