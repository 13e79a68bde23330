"""Orders and outcomes of steps, as executors pass them to workers and back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from specdec.cache.block_moves import BlockMove
from specdec.draft_heads.drafting.chains import ChainNodes
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.execution.device_clock import Mark
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.kernels.types.types import Acceptance


class StepOrder(NamedTuple):
    """Inputs of one step. `parts`, `drafts` and `chains` have one entry per row.

    Attributes:
        parts: known tokens of the rows, and their block tables.
        drafts: inputs of the drafter.
        chains: draft nodes that need no model; None for a row without.
        sampled: indices of the rows after which a token is sampled.
        moves: block moves that precede the pass. The worker empties the list once they are made.
        needs_logits: whether the outcome holds the logits.
        is_launched: whether the pass was launched behind the step before.
        followed: rows whose next token's pass is launched behind this step. All rows are sampled then.
    """

    parts: list[TreeRow]
    drafts: list[DraftRow]
    chains: list[ChainNodes | None]
    sampled: list[int]
    moves: list[BlockMove]
    needs_logits: bool
    is_launched: bool = False
    followed: Sequence[int] = ()


class StepOutcome(NamedTuple):
    """Outcome of a step.

    Attributes:
        trees: the draft tree of each row.
        acceptances: one per sampled row.
        logits: `[sum of (num_scored + nodes), vocab_size]` if the order asks for them, else None; valid until the next
            step.
        drafting: when drafting began and ended, and reading behind the pass where there was any.
        scores: by row, log-probabilities of its choices, or of its new tokens by token. The engine computes them from
            the logits; a pipeline stage before the last gets them.
    """

    trees: Sequence[DraftTree]
    acceptances: list[Acceptance]
    logits: Tensor | None
    drafting: list[tuple[Mark, Mark]]
    scores: dict[int, list[Any]]
