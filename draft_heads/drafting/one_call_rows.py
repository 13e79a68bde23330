"""Rows as a drafter takes them that drafts in one call."""

from collections.abc import Sequence

from specdec.draft_heads.drafting.drafter import DraftRow, Proposal
from specdec.kernels.types.fused import DraftingRow
from specdec.verify.verifier import noise_key


def one_call_rows(
    rows: Sequence[DraftRow], most_levels: int, first: int, proposal: Proposal
) -> list[DraftingRow] | None:
    """Return rows for a drafter in one call, None where a row needs logit edits or drawn tokens.

    Args:
        most_levels: of a tree.
        first: the head's first entry.
    """
    given = list[DraftingRow]()
    for row in rows:
        sampling, drafts = row.context.sampling, row.num_nodes > 0
        is_drawn = proposal == Proposal.DRAWN and not sampling.is_greedy
        if drafts and (sampling.edits or is_drawn):
            return None
        start, end = max(row.num_draft_cached, first), row.draft_prefill_end
        depth = min(most_levels, row.max_depth) if drafts else 0
        noise = None if sampling.is_greedy or not depth else noise_key(row.context)
        temperature = 1.0 if sampling.is_greedy else sampling.temperature
        tokens = row.token_ids[start:end]
        limits = sampling.limits if sampling.filters else None
        given.append(
            DraftingRow(
                row.block_table,
                tokens,
                start,
                end,
                max(row.draft_start, first),
                row.num_nodes,
                depth,
                temperature,
                limits,
                noise,
                row.adapter,
            )
        )
    return given
