"""A batch with drafts and without them, measured in turns."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specdec.cli.timed_batch import TimedBatch, run_batch
from specdec.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec.llm import LLM

# Rounds, each of one run with drafts and one without: at least this many, and more within this time.
LEAST_ROUNDS, MOST_ROUNDS, SECONDS = 5, 60, 4.0
# Seconds after which no further round begins.
LONGEST = 30.0


def measure_in_turns(
    llms: "Sequence[LLM]", prompts: Sequence[str | list[int]], params: Sequence[SamplingParams], first: TimedBatch
) -> list[TimedBatch]:
    """Run the same prompts with each engine in turns, so that a slow moment of the machine meets all of them.

    The first runs are not measured: they fill the prefix cache, and bring measured costs up to date.

    Args:
        llms: engines; their order is reversed from round to round.
        first: a run of the first engine, whose text was shown.

    Returns:
        Per engine the run whose time is the median. Ctrl-C ends the measurement; the last batch is `interrupted` then.
    """
    warm = [first, *(run_batch(llm, prompts, params, "without drafts") for llm in llms[1:])]
    rounds: list[list[TimedBatch]] = [[] for _ in llms]
    began = time.perf_counter()
    while not any(batch.interrupted for batch in warm):
        number, elapsed = len(rounds[0]), time.perf_counter() - began
        # Runs this long need no others to be told apart from noise.
        is_long = sum(batch.seconds for batch in warm) + elapsed > LONGEST
        if is_long or number >= MOST_ROUNDS or (number >= LEAST_ROUNDS and elapsed > SECONDS):
            break
        done: dict[int, TimedBatch] = {}
        for place in range(len(llms))[:: -1 if number % 2 else 1]:
            done[place] = run_batch(llms[place], prompts, params, "measuring")
            if done[place].interrupted:
                return [*warm[:-1], replace(warm[-1], interrupted=True)]
        for place, batch in done.items():
            rounds[place].append(batch)
    found = [_median(batches) if batches else one for one, batches in zip(warm, rounds, strict=True)]
    # The text is the one that was shown, with its colours.
    for answer, shown in zip(found[0].answers, first.answers, strict=True):
        answer.segments = shown.segments
    return found


def _median(batches: Sequence[TimedBatch]) -> TimedBatch:
    return sorted(batches, key=lambda batch: batch.seconds)[len(batches) // 2]
