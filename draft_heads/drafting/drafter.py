"""The interface of drafters."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from specdec.kernels.types.draft_trees import DraftTrees, HostTrees
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

    @property
    def token_ids(self) -> Sequence[int]:
        """All known tokens; the last one is the tree's root."""
        return self.context.token_ids


class Drafter(Protocol):
    """Proposer of draft trees. Its state of a request lies in the cache, under the request's block table."""

    def propose(self, rows: Sequence[DraftRow]) -> DraftTrees:
        """Draft one tree per row, of at most `num_nodes` nodes and `max_depth` levels.

        A drafter with a cache of its own first fills it up to each row's `draft_prefill_end`.
        """
        ...


class NoDrafter:
    """Plain decoding: empty trees."""

    def propose(self, rows: Sequence[DraftRow]) -> HostTrees:
        return HostTrees.empty(len(rows))
