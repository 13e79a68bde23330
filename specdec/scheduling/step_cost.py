"""Prediction of how long the parts of a step take on this machine. Pure Python."""

import math
import sys
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple


class Curve:
    """Linear interpolation between points, extended at both ends; never falls and is never below 0.

    Args:
        points: `(x, y)`, at least one, x ascending. A y below an earlier one is raised to it.

    Raises:
        ValueError: no point, or an x that does not ascend.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        pairs = list(points)
        self.xs = [float(x) for x, _ in pairs]
        self.ys = list(accumulate((float(y) for _, y in pairs), max))
        if not pairs or any(a >= b for a, b in zip(self.xs, self.xs[1:], strict=False)):
            raise ValueError(f"a curve needs points with ascending x; got {self.xs}")

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0]
        i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        return max(0.0, ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1]))

    def inverse(self, y: float) -> float:
        """Return the x that costs `y`: the first point's x below a flat start, infinity beyond a flat end."""
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return xs[0] if y < ys[0] else float("inf")
        i = min(max(bisect_right(ys, y), 1), len(ys) - 1)
        rise = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        if rise == 0:
            return xs[0] if y < ys[i] else float("inf")
        return xs[i - 1] + (y - ys[i - 1]) / rise


# Number of measurements kept, of which a low one is used: disturbances only make steps longer. They often last for
# several steps, so measurements closer together than this many seconds are merged. Fewer are kept of what a prompt
# adds, which changes with each of its chunks.
KEPT, KEPT_OF_PREFILL, LEAST_SECONDS = 5, 3, 0.02
# Measurements of a ratio with which one disturbed step does not matter.
SETTLED = 3
# Total seconds of measured steps of one size from which on their cost counts as known.
KNOWN_SECONDS = 0.005
# Measurements whose mean is used.
KEPT_OF_SHARE = 16
# Plain steps that begin within this many seconds after the draft model's pass are not measured: a small model's weights
# are then not yet back in the processor's caches, and a step takes up to half as long again. A step that takes
# LONG_SECONDS reads more weights than the caches hold.
WARM_SECONDS, LONG_SECONDS = 0.004, 0.008
# In a run of more than LONG_RUN plain steps, or steps with trees, one step in MEASURED_EVERY corrects the costs: a
# correction takes 2 to 10 % of a small model's step. Not one in two or four: patterns of that length would be missed.
LONG_RUN, MEASURED_EVERY = 16, 5
# A measurement is old after this many seconds and as many steps of the present length: contexts have grown since.
OLD_SECONDS, OLD_STEPS = 0.25, 32
# Steps with prompts after which one computes none, so that its cost is measured: what prompts add cannot be told from a
# change of the decoding rows. The first number is for a size that no step has measured.
ALONE_AFTER, ALONE_EVERY = 8, 64
# Lower bound of a ratio: noise in the part it is separated from can make a part seem to take no time.
LEAST = 0.01
# Upper bound of a share: measurements are noisy, so it may exceed the whole.
MOST = 1.5
# Prompt tokens that every step may compute, whatever they cost.
LEAST_PROMPT_TOKENS = 16
NOTHING = Curve([(1, 0.0)])


def is_passed_over(run: int) -> bool:
    """Return whether the costs are not corrected by a step.

    Args:
        run: steps of its kind in a row up to it, itself included.
    """
    return run > LONG_RUN and run % MEASURED_EVERY > 0


class Ratio:
    """Measured over predicted seconds, a low quantile of the last measurements: the second smallest of three or more.

    Args:
        kept: number of measurements.
        value: prior, until something is measured.
    """

    def __init__(self, kept: int = KEPT, value: float = 1.0) -> None:
        self.value = value
        self._last: deque[float] = deque(maxlen=kept)
        # Sums of the newest measurement, and the time of its first step.
        self._seconds, self._predicted, self._began = 0.0, 0.0, -math.inf

    def correct(self, seconds: float, predicted: float, clock: float) -> None:
        """Count a step's part.

        Args:
            clock: time of the step, in seconds.
        """
        if predicted <= 0:
            return
        if clock - self._began < LEAST_SECONDS:
            self._last.pop()
            self._seconds += seconds
            self._predicted += predicted
        else:
            self._seconds, self._predicted, self._began = seconds, predicted, clock
        self._last.append(max(self._seconds / self._predicted, LEAST))
        self.value = _low(self._last)

    @property
    def count(self) -> int:
        """Measurements that the value is made of."""
        return len(self._last)

    def lean_on(self, other: "Ratio") -> None:
        """Count a similar part's ratio, which was measured, as one more measurement of this one."""
        self.value = _low([*self._last, _low(other._last)])

    def scale(self, factor: float) -> None:
        """Multiply all measurements."""
        self.value *= factor
        self._last = deque((factor * last for last in self._last), maxlen=self._last.maxlen)
        self._seconds *= factor


def _low(measured: Iterable[float]) -> float:
    known = sorted(measured)
    return known[1 if len(known) >= SETTLED else 0]


class Ratios:
    """One `Ratio` for each power of two of rows; sizes that were not measured use the nearest one.

    One that was measured less than three times leans on the nearest that was measured more often: under load most steps
    compute prompts, so that some numbers of rows are measured once or twice, and then not again for long.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, Ratio] = {}
        # Seconds of the measured steps of each size that has been met, and the time of the last one.
        self._measured: dict[int, float] = {}
        self._measured_at: dict[int, float] = {}

    def at(self, rows: int) -> float:
        """Return the ratio for this number of rows."""
        size = rows.bit_length()
        own = self._by_size.get(size) or self._nearest(size, list(self._by_size))
        return 1.0 if own is None else own.value

    def knows(self, rows: int) -> bool:
        """Return whether enough steps of this size were measured to tell how long they take."""
        return self._measured.get(rows.bit_length(), 0.0) >= KNOWN_SECONDS

    def is_doubtful(self, rows: int) -> bool:
        """Return whether this number of rows was measured so seldom that a single disturbed step decides."""
        own = self._by_size.get(rows.bit_length())
        return own is not None and 0 < own.count < SETTLED

    def is_measured(self, rows: int, since: float) -> bool:
        """Return whether a step of this size was measured after a time."""
        return self._measured_at.get(rows.bit_length(), -math.inf) > since

    def correct(self, rows: int, seconds: float, predicted: float, clock: float) -> None:
        """Count a step without prompts."""
        size = rows.bit_length()
        # The first step of a size takes longer.
        if size not in self._measured:
            self._measured[size] = 0.0
            return
        self._measured[size] += seconds
        self._measured_at[size] = clock
        self._at_size(rows).correct(seconds, predicted, clock)
        for size, ratio in self._by_size.items():
            if ratio.count < SETTLED:
                more = [other for other, known in self._by_size.items() if known.count > ratio.count]
                if nearest := self._nearest(size, more):
                    ratio.lean_on(nearest)

    def _nearest(self, size: int, others: Sequence[int]) -> Ratio | None:
        """Return the ratio of the nearest of other sizes, of those that were measured if any was."""
        measured = [other for other in others if self._by_size[other].count]
        nearest = min(measured or others, key=lambda other: abs(other - size), default=None)
        return None if nearest is None else self._by_size[nearest]

    def follow(self, rows: int, factor: float) -> None:
        """Change the ratio of a size by the factor by which the other kind of step changed there."""
        self._at_size(rows).scale(factor)

    def _at_size(self, rows: int) -> Ratio:
        return self._by_size.setdefault(rows.bit_length(), Ratio(value=self.at(rows)))


class Share:
    """Used share of a part, mostly little and at times all: the mean of the last measurements.

    Args:
        value: prior.
    """

    def __init__(self, value: float) -> None:
        self.value = value
        self._last: deque[float] = deque(maxlen=KEPT_OF_SHARE)

    def correct(self, seconds: float, most: float) -> None:
        if most > 0:
            self._last.append(min(max(seconds / most, LEAST), MOST))
            self.value = sum(self._last) / len(self._last)


class MeasuredStep(NamedTuple):
    """Sizes of a step and the time that it took.

    Attributes:
        rows: rows of one known token.
        tokens: their known tokens and draft nodes.
        prompts: tokens of prompts, which are not among `tokens`.
        seconds: time of the step without drafting.
        trees: trees that were drafted.
        levels: limit of their levels.
        read: tokens that the draft head has read.
        draft_seconds: time of drafting, reading included.
    """

    rows: int
    tokens: int
    prompts: int
    seconds: float
    trees: int
    levels: int
    read: int
    draft_seconds: float


@dataclass
class StepCost:
    """Costs measured at the start, and corrected as the engine runs: contexts grow, and machines are shared.

    Attributes:
        passes: seconds of a forward pass, by the number of tokens of one row.
        rows: seconds that are added if the tokens belong to several rows, by the number of rows.
        first_level: seconds of drafting trees of one level, by the number of trees.
        all_levels: seconds of drafting trees of `depth` levels, by the number of trees.
        depth: number of levels of `all_levels`.
        reading: seconds in which a draft head reads tokens, by their number.
        plain, checking: corrections of steps without trees, and of steps with trees except their drafting. Everything
            else in a step counts as its pass.
        prefill: correction of what prompts add to a step.
        first: correction of drafting one level.
        deeper: by the limit of levels, the used share of the levels behind the first.
    """

    passes: Curve
    rows: Curve = NOTHING
    first_level: Curve = NOTHING
    all_levels: Curve = NOTHING
    depth: int = 1
    reading: Curve = NOTHING
    plain: Ratios = field(default_factory=Ratios)
    checking: Ratios = field(default_factory=Ratios)
    prefill: Ratio = field(default_factory=lambda: Ratio(KEPT_OF_PREFILL))
    first: Ratio = field(default_factory=Ratio)
    # A prior low enough that trees are tried: many drafters stop where deeper nodes are unlikely.
    deeper: dict[int, Share] = field(default_factory=lambda: defaultdict(lambda: Share(0.3)))
    # Total seconds of measured steps, that total when the draft model's last pass ended, and steps with trees in a row.
    _clock: float = 0.0
    _last_trees: float = -math.inf
    _tree_run: int = 0
    # Steps with prompts since the last one whose decoding rows were measured.
    _beside_prompts: int = 0

    def step(self, rows: int, tokens: float, trees: int, levels: int) -> float:
        """Predict the seconds of a step; `MeasuredStep` describes its sizes, tokens may be a mean."""
        ratio = (self.checking if tokens > rows else self.plain).at(rows)
        return ratio * (self.passes(tokens) + self.rows(rows)) + self.draft(trees, levels)

    def without_drafts(self, rows: int, prompts: int) -> float:
        """Predict the seconds of a step without drafts.

        Args:
            rows: rows of one known token.
            prompts: tokens of prompts beside them.
        """
        own, alone = (self.step(rows, rows, 0, 0), self.passes(rows)) if rows else (0.0, 0.0)
        return own + (self.prefill.value * (self.passes(rows + prompts) - alone) if prompts else 0.0)

    def prompt_tokens(self, stretch: float, prompts: int, decoding: int, nodes: int, trees: int, levels: int) -> int:
        """Return how many tokens of prompts a step may compute, so that outputs are not delayed too long.

        Where a pass is bound by memory, prompt tokens are nearly free. Where it is bound by arithmetic, a chunk of 256
        beside 8 decoding rows takes as long as ten steps.

        Args:
            stretch: limit of the time of a step with one prompt over its time without. Each further prompt adds as
                much as the first, so that steps get longer, and throughput higher, where many wait. 0 for no limit.
            prompts: number of prompts, waiting or being prefilled.
            decoding: rows of one known token; `trees` of them draft trees of this many nodes and at most these levels.
        """
        if not stretch or not decoding:
            return sys.maxsize
        own = decoding + trees * nodes
        seconds = prompts * (stretch - 1) * self.step(decoding, own, trees, levels) / self.prefill.value
        more = self.passes.inverse(self.passes(own) + seconds) - own
        return max(LEAST_PROMPT_TOKENS, int(min(more, sys.maxsize)))

    def is_due(self, rows: int, tokens: int) -> bool:
        """Return whether a step should compute no prompts, so that its decoding rows are measured.

        Args:
            rows: rows of one known token.
            tokens: their known tokens and draft nodes.
        """
        is_known = (self.checking if tokens > rows else self.plain).knows(rows)
        return self._beside_prompts >= (ALONE_EVERY if is_known else ALONE_AFTER)

    def draft(self, trees: int, levels: int) -> float:
        """Predict the seconds of drafting trees of at most this many levels."""
        if trees == 0 or levels == 0:
            return 0.0
        return self.first.value * self.first_level(trees) + self.deeper[levels].value * self._deeper(trees, levels)

    def _deeper(self, trees: int, levels: int) -> float:
        if self.depth == 1:
            return 0.0
        most = max(0.0, self.all_levels(trees) - self.first_level(trees))
        return most * (levels - 1) / (self.depth - 1)

    def correct(self, step: MeasuredStep) -> None:
        """Correct the predictions by a measured step."""
        rows, tokens, prompts, seconds, trees, levels, read, draft_seconds = step
        ratio = self.checking if tokens > rows else self.plain
        is_warm = seconds > LONG_SECONDS or self._clock - self._last_trees >= WARM_SECONDS
        self._clock += seconds + draft_seconds
        if trees:
            self._last_trees = self._clock
        self._tree_run = self._tree_run + 1 if rows < tokens else 0
        if prompts and tokens:
            self._beside_prompts += 1
        if is_passed_over(self._tree_run) and (prompts or not self.is_due(rows, tokens)):
            return
        alone = self.passes(tokens) + self.rows(rows)
        if prompts:
            more = seconds - ratio.at(rows) * alone if tokens else seconds
            predicted = self.passes(tokens + prompts) - (self.passes(tokens) if tokens else 0.0)
            self.prefill.correct(max(0.0, more), predicted, self._clock)
        elif rows < tokens or is_warm:
            other, before = self.plain if ratio is self.checking else self.checking, ratio.at(rows)
            since = self._clock - max(OLD_SECONDS, OLD_STEPS * seconds)
            was_measured, self._beside_prompts = ratio.is_measured(rows, since), 0
            ratio.correct(rows, seconds, alone, self._clock)
            is_old = ratio is self.plain and was_measured and not other.is_measured(rows, since)
            if is_old or not other.knows(rows):
                # Longer contexts and other programs slow down both.
                other.follow(rows, ratio.at(rows) / before)
        if trees:
            # Reading has its share of the time, so that what disturbs the reading of a long text is not taken for slow
            # drafting.
            most = self.first_level(trees) + self._deeper(trees, levels)
            reading = max(0.0, self.reading(read) - self.reading(trees))
            draft_seconds *= most / (most + reading) if reading else 1.0
            if levels == 1:
                self.first.correct(draft_seconds, self.first_level(trees), self._clock)
            else:
                rest = draft_seconds - self.first.value * self.first_level(trees)
                self.deeper[levels].correct(max(0.0, rest), self._deeper(trees, levels))
