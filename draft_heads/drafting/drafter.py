"""What the engine asks of whoever proposes draft trees."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from specdec.verify.draft_trees import DraftTrees, HostTrees
from specdec.verify.sampling import Context


class Proposal(StrEnum):
    """How a tree's tokens are chosen at temperature > 0; at 0 it is always the likeliest.

    Attributes:
        COUPLED: the likeliest after adding the position's own noise to log q: for `CoupledVerifier`.
        LIKELIEST: the head's likeliest, as EAGLE-2 does.
        DRAWN: drawn from q without replacement, and q handed on with the tree: for rejection rules.
    """

    COUPLED = "coupled"
    LIKELIEST = "likeliest"
    DRAWN = "drawn"


class DraftRow(NamedTuple):
    """A row of the coming step, as a drafter sees it.

    Attributes:
        block_table: enough blocks for `len(token_ids) + DraftShape.slots` entries where nodes are asked; those
            that drafts of `num_nodes` and `max_depth` do not reach may be the same for many rows.
        num_draft_cached: tokens for which the drafter's own cache is filled.
        draft_prefill_end: tokens for which it will be after the call: all of them where nodes are asked; at most
            `num_draft_cached` where there is nothing to do.
        num_nodes: most nodes wanted, 0 for none.
        max_depth: no node deeper than this can be emitted any more, or has a place in the cache.
        context: how the request samples, and what it has said; at temperature > 0 drafts follow its noise.
    """

    block_table: Sequence[int]
    num_draft_cached: int
    draft_prefill_end: int
    num_nodes: int
    max_depth: int
    context: Context

    @property
    def token_ids(self) -> Sequence[int]:
        """All known tokens; the last one is the tree's root."""
        return self.context.token_ids


class Drafter(Protocol):
    """Proposes trees. What it needs of a request's past lies in the cache, under the request's block table."""

    def propose(self, rows: Sequence[DraftRow]) -> DraftTrees:
        """Draft one tree per row, of at most `num_nodes` nodes and `max_depth` levels.

        A drafter with a cache of its own first brings it up to each row's `draft_prefill_end`.
        """
        ...


class NoDrafter:
    """Plain decoding."""

    def propose(self, rows: Sequence[DraftRow]) -> HostTrees:
        return HostTrees.empty(len(rows))
