"""How long the parts of a step take on the machine at hand. Pure Python."""

from collections import deque
from dataclasses import dataclass, field

from specdec.curve import Curve

# Measurements whose median counts, of which one in two may be an accident. What a prompt adds changes with every chunk
# of it.
KEPT, KEPT_OF_PREFILL = 9, 3
# Of a part that seems to take no time, as by an accident of the part it is told from.
LEAST = 0.01
NOTHING = Curve([(1, 0.0)])


class Ratio:
    """Seconds measured over those foretold: the median of the last ones.

    Args:
        kept: how many.
        value: what is believed before the first.
    """

    def __init__(self, kept: int = KEPT, value: float = 1.0) -> None:
        self.value = value
        self._last: deque[float] = deque(maxlen=kept)

    def correct(self, seconds: float, foretold: float) -> None:
        if foretold > 0:
            self._last.append(max(seconds / foretold, LEAST))
            self.value = sorted(self._last)[len(self._last) // 2]


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
    plain: Ratio = field(default_factory=Ratio)
    checking: Ratio = field(default_factory=Ratio)
    prefill: Ratio = field(default_factory=lambda: Ratio(KEPT_OF_PREFILL))
    first: Ratio = field(default_factory=Ratio)
    # A belief that has trees tried: most drafters stop where there is little chance of getting deeper.
    deeper: Ratio = field(default_factory=lambda: Ratio(value=0.3))

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
        ratio = self.checking if trees else self.plain
        alone = self.passes(tokens) + self.rows(rows)
        if prompts:
            more = seconds - ratio.value * alone if tokens else seconds
            foretold = self.passes(tokens + prompts) - (self.passes(tokens) if tokens else 0.0)
            self.prefill.correct(max(0.0, more), foretold)
        else:
            ratio.correct(seconds, alone)
        if trees:
            draft_seconds -= max(0.0, self.reading(read) - self.reading(trees))
            if levels == 1:
                self.first.correct(draft_seconds, self.first_level(trees))
            else:
                rest = draft_seconds - self.first.value * self.first_level(trees)
                self.deeper.correct(max(0.0, rest), self._deeper(trees, levels))
