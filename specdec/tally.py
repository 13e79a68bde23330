"""How far the planning of a step has come."""

from dataclasses import dataclass, field

from specdec.plan import Plan, PlannedRow
from specdec.request import Request


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
