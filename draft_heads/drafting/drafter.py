"""The interface of drafters: their rows, and trees that a device drafts before the host knows the step before."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from specdec.kernels.types.draft_trees import DraftTrees, HostTrees
from specdec.kernels.types.types import Acceptance, TokenTargets, Walk
from specdec.kernels.types.upload import Packet
from specdec.verify.sampling import Context


class Proposal(StrEnum):
    """Choice of a tree's tokens at temperature > 0; at 0 the most probable ones are taken.

    Attributes:
        COUPLED: the largest log q plus the position's own noise, for `CoupledVerifier`.
        DRAWN: drawn from q without replacement, and q passed on with the tree, for `RejectionVerifier`.
    """

    COUPLED = "coupled"
    DRAWN = "drawn"


class DraftRow(NamedTuple):
    """A row of the coming step, as a drafter takes it.

    Attributes:
        block_table: where `num_nodes` > 0, enough blocks for `len(token_ids) + DraftShape.slots` entries; blocks that
            drafts of `num_nodes` and `max_depth` do not reach may be shared by many rows.
        num_draft_cached: tokens for which the drafter's own cache is filled.
        draft_prefill_end: tokens for which it is filled by the call: all of them where `num_nodes` > 0; at most
            `num_draft_cached` where there is nothing to do.
        num_nodes: most nodes wanted, 0 for none.
        max_depth: most levels: deeper nodes could not be emitted, or have no place in the cache.
        context: how the request samples, and its tokens; at temperature > 0 drafts follow its noise.
        full_depth: whether all `max_depth` levels are drafted, even where `DraftShape.min_reach` would stop.
        adapter: place of the request's adapter of the draft model, 0 for none.
        draft_start: first entry of the drafter's own cache that holds something, up to `num_draft_cached`. It lies as
            far back as the drafter's rows depend on, or is 0.
        is_followed: whether the row's own blocks hold `DraftShape.slots_ahead` entries behind its known tokens, so that
            the tree of the step after this one may be drafted ahead; see `DraftsAhead`.
    """

    block_table: Sequence[int]
    num_draft_cached: int
    draft_prefill_end: int
    num_nodes: int
    max_depth: int
    context: Context
    full_depth: bool = False
    adapter: int = 0
    draft_start: int = 0
    is_followed: bool = False

    @property
    def drafts(self) -> bool:
        """Return whether the row gets a tree: it may have nodes, and the drafter reads all its known tokens."""
        return self.num_nodes > 0 and self.max_depth > 0 and self.draft_prefill_end == len(self.token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """All known tokens; the last one is the tree's root."""
        return self.context.token_ids


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


# Moves the accepted entries of a walk, and writes the new tokens to where drafting reads them.
Commit = Callable[[Walk, Sequence[TokenTargets]], None]
# Drafts for the coming step behind a walk, once it is committed.
DraftAhead = Callable[[Walk, Commit], DraftsAhead]


class Drafter(Protocol):
    """Proposer of draft trees. Its state of a request lies in the cache, under the request's block table."""

    def propose(self, rows: Sequence[DraftRow], packet: Packet | None = None) -> DraftTrees:
        """Draft one tree per row, of at most `num_nodes` nodes and `max_depth` levels.

        A drafter with a cache of its own first fills it up to each row's `draft_prefill_end`.

        Args:
            packet: may take what the trees are made of, so that the step needs no other; it need not be sent before
                they are used. None for one of their own.
        """
        ...

    def prepare_ahead(
        self, rows: Sequence[DraftRow], trees: DraftTrees, places: Sequence[int], packet: Packet
    ) -> tuple[list[int], DraftAhead] | None:
        """Prepare to draft the trees of the step after this one; see `TreeDrafter.prepare_ahead`."""
        ...


class NoDrafter:
    """Plain decoding: empty trees."""

    def propose(self, rows: Sequence[DraftRow], packet: Packet | None = None) -> HostTrees:  # noqa: ARG002
        return HostTrees.empty(len(rows))

    def prepare_ahead(self, rows: Sequence[DraftRow], trees: DraftTrees, places: Sequence[int], packet: Packet) -> None:
        """Do nothing."""
