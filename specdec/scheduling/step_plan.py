"""Records of one step: the rows that the scheduler plans, what they leave of the step's limits, and their results.

Pure Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from specdec.cache.block_moves import BlockMove
from specdec.core.choices import ChoiceTree
from specdec.core.engine_stats import EngineStats
from specdec.core.request import Request
from specdec.draft_heads.drafting.chains import ChainNodes, ChainTree


@dataclass(slots=True)
class PlannedRow:
    """A request's share of the coming step.

    Attributes:
        num_known: length of its chain, `token_ids[num_cached : num_cached + num_known]`.
        sampled: whether the chain reaches the last known token, so that the step samples a token after it. Never of a
            request that scores choices.
        draft_prefill_end: number of known tokens that the draft head's cache covers after the step. Where it lies
            beyond the first token of the chain, the head reads behind the target's pass.
        num_nodes: limit of the draft model's nodes below the chain's end.
        max_depth: limit of their depth: deeper nodes could not be emitted or have no slot.
        chains: draft tokens that need no model, whether or not they are verified; None if there are none.
        num_chained: number of their most valuable nodes that are verified too.
        choices: the choices that the step scores; None if there are none.
    """

    request: Request
    num_known: int
    sampled: bool
    draft_prefill_end: int = 0
    num_nodes: int = 0
    max_depth: int = 0
    chains: ChainTree | None = None
    num_chained: int = 0
    choices: ChoiceTree | None = None

    @property
    def fixed_nodes(self) -> ChainNodes | None:
        """Return the nodes that no model drafts: of choices, or of chains that are verified; None if there are none."""
        if self.choices is not None:
            return ChainNodes(self.choices.tokens, self.choices.parents) if self.choices.tokens else None
        return self.chains.best(self.num_chained) if self.chains is not None and self.num_chained else None


def prompt_tokens(rows: Sequence[PlannedRow]) -> list[int]:
    """Return how many tokens of each row are a prompt's, 0 for a row that decodes; drafts do not count.

    The nodes of choices are no drafts, and cost as much as tokens of a prompt.
    """
    nodes = [0 if row.choices is None else len(row.choices.tokens) for row in rows]
    return [row.num_known + own if row.num_known > 1 or own else 0 for row, own in zip(rows, nodes, strict=True)]


@dataclass(slots=True)
class StepPlan:
    """Rows of a step, and the block moves that precede its forward pass, in order.

    Attributes:
        is_launched: whether the pass was launched behind the step before, which named these rows as followed.
        followed: requests of the step whose next token's pass is launched behind it, before the host knows the token;
            they have blocks for it, and the step after this one is planned of those that have not ended.
        lost: requests, of this plan and others, that ended because the step failed before all `moves` were made.
    """

    rows: list[PlannedRow] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)
    is_launched: bool = False
    followed: list[Request] = field(default_factory=list)
    lost: list[Request] = field(default_factory=list)

    def checksum(self) -> int:
        """Return a number by which plans of several ranks are compared."""
        rows = [
            (
                *(row.request.request_id, len(row.request.token_ids), row.request.token_ids[-1]),
                *(row.num_known, row.draft_prefill_end, row.num_nodes, row.max_depth, row.num_chained),
                row.request.block_table[-1:],
            )
            for row in self.rows
        ]
        return crc32(repr((rows, self.moves)).encode())


@dataclass(slots=True)
class RowResult:
    """The verified outcome of a planned row.

    Attributes:
        num_nodes: draft nodes that were verified.
        path: accepted nodes from depth 1 on.
        ranks: the same nodes by their rank in the tree, the most probable node being 0.
        tokens: tokens of `path`, and the one that the target adds.
        is_dead_end: whether the target could add no token.
        needs_retry: whether the row is discarded and its request repeats the step without drafts.
        num_new: tokens that the request has taken; fewer than `tokens` where its output ends within them.
        num_accepted: number of them that were drafts.
        num_chained: verified nodes that come from chains alone; they rank behind the model's.
        node_probs: the target's probability of each draft node, for a traced request.
    """

    num_nodes: int = 0
    path: Sequence[int] = ()
    ranks: Sequence[int] = ()
    tokens: Sequence[int] = ()
    is_dead_end: bool = False
    needs_retry: bool = False
    num_new: int = 0
    num_accepted: int = 0
    num_chained: int = 0
    node_probs: tuple[float, ...] = ()


@dataclass(slots=True)
class StepBudget:
    """Rows planned so far, and what they leave of the step's limits.

    Attributes:
        stats: the scheduler's counts, to which planning adds.
        tokens: left of `max_num_batched_tokens`.
        prompt_tokens: number of them that prompts may take.
        decodes_left: running requests not planned yet that need one token each, which is kept for them.
        next_running: index of the next running request.
        next_waiting: index of the next waiting request; those before it were skipped.
        admitting: whether waiting requests are still considered.
        choosing: planned rows whose requests score choices in this step.
        partial_prefills: planned prompts that need further steps.
        seats_kept, blocks_kept: seats and blocks that skipped requests will need.
        preempted: requests that lost their blocks in this step; none of them is admitted again in it.
    """

    stats: EngineStats
    tokens: int
    prompt_tokens: int
    decodes_left: int
    rows: list[PlannedRow] = field(default_factory=list)
    next_running: int = 0
    next_waiting: int = 0
    admitting: bool = True
    choosing: list[PlannedRow] = field(default_factory=list)
    partial_prefills: int = 0
    seats_kept: int = 0
    blocks_kept: int = 0
    preempted: list[Request] = field(default_factory=list)

    def take(self, request: Request, known: int, uncached: int) -> None:
        """Add a row of `known` tokens for a request that has `uncached` ones, with the nodes that it needs."""
        self.tokens -= known
        if uncached > 1:
            self.prompt_tokens -= known
        row = PlannedRow(request, known, known == uncached and request.choices is None)
        self.rows.append(row)
        if known < uncached:
            self.partial_prefills += 1
        elif request.choices is not None:
            self.tokens -= request.least_nodes
            self.choosing.append(row)

    def skip(self, lacking: int) -> None:
        """Let requests behind the next waiting one go first, but not into its seat or the blocks that it lacks."""
        self.next_waiting += 1
        self.seats_kept += 1
        self.blocks_kept += lacking
