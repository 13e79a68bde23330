"""The interface of drafters."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

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


class Learner(Protocol):
    """Drafts for the coming step, of use to requests that take exactly the tokens of this step's outcome."""

    def learn(self, acceptances: Sequence[Acceptance]) -> None:
        """Take the outcome of each row that was drafted for, which tells the tokens that its draft is for."""
        ...


# Moves the accepted entries of a walk, and writes the new tokens to where drafting reads them.
Commit = Callable[[Walk, Sequence[TokenTargets]], None]
# Drafts for the coming step behind a walk, once it is committed.
DraftAhead = Callable[[Walk, Commit], Learner]


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
