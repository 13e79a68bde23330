"""How long the parts of a step take on the machine at hand. Pure Python."""

from dataclasses import dataclass, field

from specdec.curve import Curve

# Weight of a new measurement where there was one in the step before, and the most one ever has. What a prompt adds
# changes with every chunk of it.
NEWS, PREFILL_NEWS = 0.05, 0.3
MOST_NEWS = 0.3
# How far one may be off before it counts as an accident.
MOST_OFF = 2.0
NOTHING = Curve([(1, 0.0)])


@dataclass
class Ratio:
    """Seconds measured over those foretold, lately: a moving mean in which the past fades by the step."""

    news: float = NEWS
    value: float = 1.0
    step: int = 0

    def correct(self, step: int, seconds: float, foretold: float) -> None:
        if foretold <= 0:
            return
        news = min(max(seconds / foretold, self.value / MOST_OFF), self.value * MOST_OFF)
        weight = min(MOST_NEWS, 1 - (1 - self.news) ** (step - self.step))
        self.value += weight * (news - self.value)
        self.step = step


@dataclass
class StepCost:
    """Measured at the start, and corrected as the engine runs: contexts grow, and machines are shared.

    Attributes:
        passes: seconds of a forward pass over tokens of one row.
        rows: seconds more where as many rows have them, over the rows.
        first_level: seconds of drafting trees of one level, over their number.
        all_levels: seconds of drafting trees of `depth` levels, over their number.
        depth: of these.
        reading: seconds in which a draft head reads tokens.
        steps: that have been counted.
        plain, checking: corrections of steps without trees, and of steps with trees but their drafting; the rest of
            a step counts as its pass.
        prefill: correction of what prompts add to a step.
        first, deeper: corrections of drafting one level, and of all others together, which a drafter may not need.
    """

    passes: Curve
    rows: Curve = NOTHING
    first_level: Curve = NOTHING
    all_levels: Curve = NOTHING
    depth: int = 1
    reading: Curve = NOTHING
    steps: int = 0
    plain: Ratio = field(default_factory=Ratio)
    checking: Ratio = field(default_factory=Ratio)
    prefill: Ratio = field(default_factory=lambda: Ratio(PREFILL_NEWS))
    first: Ratio = field(default_factory=Ratio)
    deeper: Ratio = field(default_factory=Ratio)

    def step(self, rows: int, tokens: int, trees: int, levels: int) -> float:
        """Seconds of a step.

        Args:
            rows: of it.
            tokens: of it, draft nodes among them.
            trees: that are drafted.
            levels: of these at most.
        """
        ratio = self.checking if trees else self.plain
        return ratio.value * (self.passes(tokens) + self.rows(rows)) + self.draft(trees, levels)

    def prompt_tokens(self, seconds: float, tokens: int) -> float:
        """How many tokens of prompts a step of `tokens` others can have, to take so many seconds more."""
        return self.passes.inverse(self.passes(tokens) + seconds / self.prefill.value) - tokens

    def draft(self, trees: int, levels: int) -> float:
        """Seconds to draft trees of at most so many levels."""
        if trees == 0 or levels == 0:
            return 0.0
        return self.first.value * self.first_level(trees) + self.deeper.value * self._deeper(trees, levels)

    def _deeper(self, trees: int, levels: int) -> float:
        if self.depth == 1:
            return 0.0
        most = max(0.0, self.all_levels(trees) - self.first_level(trees))
        return most * (levels - 1) / (self.depth - 1)

    def correct(
        self,
        rows: int,
        tokens: int,
        prompts: int,
        seconds: float,
        trees: int,
        levels: int,
        read: int,
        draft_seconds: float,
    ) -> None:
        """Take in what a step has taken.

        Args:
            rows, tokens, trees, levels: as for `step`.
            prompts: tokens of prompts, which are not among `tokens`.
            seconds: but for drafting.
            read: tokens the draft head has read.
            draft_seconds: of drafting, reading included.
        """
        self.steps += 1
        ratio = self.checking if trees else self.plain
        alone = self.passes(tokens) + self.rows(rows)
        if prompts:
            more = seconds - ratio.value * alone if tokens else seconds
            foretold = self.passes(tokens + prompts) - (self.passes(tokens) if tokens else 0.0)
            self.prefill.correct(self.steps, max(0.0, more), foretold)
        else:
            ratio.correct(self.steps, seconds, alone)
        if trees:
            draft_seconds -= max(0.0, self.reading(read) - self.reading(trees))
            if levels == 1:
                self.first.correct(self.steps, draft_seconds, self.first_level(trees))
            else:
                rest = draft_seconds - self.first.value * self.first_level(trees)
                self.deeper.correct(self.steps, max(0.0, rest), self._deeper(trees, levels))
