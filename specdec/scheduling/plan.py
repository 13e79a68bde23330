"""How far the planning of a step has come."""

from dataclasses import dataclass, field

from specdec.cache.kv_cache_manager import BlockMove
from specdec.core.request import Request


@dataclass(slots=True)
class PlannedRow:
    """A request's part of the coming step.

    Attributes:
        num_known: tokens of its chain, `token_ids[num_cached : num_cached + num_known]`.
        sampled: whether the chain reaches the last known token, after which one is sampled.
        draft_prefill_end: known tokens that the draft head shall have read.
        num_nodes: most draft nodes under the chain's end.
        max_depth: levels of them that could still be emitted and have a place in the cache.
    """

    request: Request
    num_known: int
    sampled: bool
    draft_prefill_end: int = 0
    num_nodes: int = 0
    max_depth: int = 0


@dataclass(slots=True)
class Plan:
    """Rows of a step, and what must be moved in the cache, in order, before its forward pass."""

    rows: list[PlannedRow] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)


@dataclass
class Tally:
    """What has been planned of a step.

    Attributes:
        budget: tokens left.
        prompt_budget: of these, tokens that prompts may take.
        singles: running requests not planned yet that need just one.
        place: of the next running request.
        passed: waiting ones that were passed over, for whom seats and blocks are kept.
        partial: prompts planned that take more steps.
        admits: whether waiting requests are still looked at.
        victims: who has been preempted in this step, and stays so for its rest.
    """

    plan: Plan
    budget: int
    prompt_budget: int
    singles: int
    place: int = 0
    passed: int = 0
    partial: int = 0
    seats_kept: int = 0
    blocks_kept: int = 0
    admits: bool = True
    victims: list[Request] = field(default_factory=list)

    def take(self, request: Request, known: int, missing: int) -> None:
        self.budget -= known
        if missing > 1:
            self.prompt_budget -= known
        self.partial += known < missing
        self.plan.rows.append(PlannedRow(request, known, known == missing))
