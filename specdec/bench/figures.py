"""Figures of a comparison: medians over its rounds, their spread, and ratios to plain decoding."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.bench.timed_run import TimedRun, TimedSample
from specdec.core.outputs import SpeculationStats


class Spread(NamedTuple):
    """Median, least and greatest value over rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Return the spread of values; None if one of them is missing, or if there are none."""
        known = list(values)
        present = [value for value in known if value is not None]
        if not present or len(present) < len(known):
            return None
        return cls(statistics.median(present), min(present), max(present))


@dataclass(frozen=True)
class Figures:
    """Figures of one mode, on all prompts or on those of one category.

    Attributes:
        prompts: number of prompts.
        output_tokens: generated tokens of a round.
        tok_per_s: tokens per second; None where other prompts ran at the same time.
        speedup: ratio of tokens per second to plain decoding, per round; None likewise.
        tau: mean tokens per step; None where the engine does not tell.
        cost: c, time of a step over that of a plain step, per round; a step's time is taken between a request's first
            and last token. None likewise.
        first_ms: milliseconds to the first token, median over the prompts, per round.
        per_token_ms: milliseconds per output token after the first, likewise.
        accepted_per_depth: share of steps in which the draft token at depth 1, 2, ... was accepted.
        nodes_per_step: draft nodes verified per step.
        differing: number of prompts whose tokens are not plain decoding's; None where they need not be.
    """

    prompts: int
    output_tokens: int
    tok_per_s: Spread | None
    speedup: Spread | None
    tau: float | None
    cost: Spread | None
    first_ms: Spread | None
    per_token_ms: Spread | None
    accepted_per_depth: list[float]
    nodes_per_step: float | None
    differing: int | None


def figures_of(
    rounds: Sequence[TimedRun], plain: Sequence[TimedRun], chosen: Sequence[int], alone: bool, comparable: bool
) -> Figures:
    """Return the figures of a mode.

    Args:
        rounds: the mode's.
        plain: those of plain decoding.
        chosen: indices of the prompts that count.
        alone: whether these prompts never ran together with others, so that they have a speed of their own.
        comparable: whether the tokens should be those of plain decoding.
    """
    own = [[one.samples[index] for index in chosen] for one in rounds]
    base = [[one.samples[index] for index in chosen] for one in plain]
    whole = len(chosen) == len(rounds[0].samples)
    speeds: list[float | None] = [None] * len(rounds)
    plain_speeds = speeds
    if whole:
        speeds, plain_speeds = [one.tok_per_s for one in rounds], [one.tok_per_s for one in plain]
    elif alone:
        speeds, plain_speeds = [_speed(samples) for samples in own], [_speed(samples) for samples in base]
    total = SpeculationStats()
    for sample in (sample for samples in own for sample in samples):
        total.add(sample.stats)
    differing = sum(
        any(samples[place].token_ids != others[place].token_ids for samples, others in zip(own, base, strict=True))
        for place in range(len(chosen))
    )
    return Figures(
        prompts=len(chosen),
        output_tokens=sum(len(sample.token_ids) for sample in own[0]),
        tok_per_s=Spread.of(speeds),
        speedup=Spread.of(map(_ratio, speeds, plain_speeds)),
        tau=total.tau if total.steps else None,
        cost=Spread.of(map(_ratio, map(_step_seconds, own), map(_step_seconds, base))),
        first_ms=Spread.of(_median(samples, lambda sample: 1000 * sample.first) for samples in own),
        per_token_ms=Spread.of(_median(samples, _per_token_ms) for samples in own),
        accepted_per_depth=[count / total.steps for count in total.accepted_per_depth],
        nodes_per_step=total.drafted / total.steps if total.drafted else None,
        differing=differing if comparable else None,
    )


def _speed(samples: Sequence[TimedSample]) -> float:
    return sum(len(sample.token_ids) for sample in samples) / sum(sample.seconds for sample in samples)


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value and other else None


def _step_seconds(samples: Sequence[TimedSample]) -> float | None:
    """Return the mean time of a step after the prompt's."""
    steps = sum(sample.stats.steps for sample in samples)
    return sum(sample.seconds - sample.first for sample in samples) / steps if steps else None


def _per_token_ms(sample: TimedSample) -> float | None:
    later = len(sample.token_ids) - 1
    return 1000 * (sample.seconds - sample.first) / later if later else None


def _median(samples: Sequence[TimedSample], value: Callable[[TimedSample], float | None]) -> float | None:
    known = [each for each in map(value, samples) if each is not None]
    return statistics.median(known) if known else None
