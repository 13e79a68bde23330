"""A batch of prompts, run to its end or to Ctrl-C, with its timings; or with drafts and without them in turns."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specdec.core.engine_stats import DraftOutlook
from specdec.core.outputs import CompletionOutput, RequestOutput, SpeculationStats
from specdec.core.progress import progress_bar
from specdec.core.sampling_params import SamplingParams
from specdec.text.segment import Segment

if TYPE_CHECKING:
    from specdec.llm import LLM

# Rounds, each of one run with drafts and one without: at least this many, and more within this time.
LEAST_ROUNDS, MOST_ROUNDS, SECONDS = 5, 60, 4.0
# Seconds after which no further round begins.
LONGEST = 30.0


@dataclass
class TimedAnswer:
    """Answer to one prompt.

    Attributes:
        output: its last state; aborted until it ends for another reason.
        segments: its text.
        seconds: time from the batch's start to this answer's end.
        max_tokens: its limit, None for that of the context alone.
    """

    output: CompletionOutput = field(default_factory=lambda: CompletionOutput(0, "", [], [], "abort"))
    segments: list[Segment] = field(default_factory=list)
    seconds: float = 0.0
    max_tokens: int | None = None

    @property
    def tok_per_s(self) -> float:
        return len(self.output.token_ids) / self.seconds if self.seconds else 0.0

    @property
    def cut(self) -> str:
        """Limit that cut the answer, in words; empty if none did."""
        if self.output.finish_reason != "length":
            return ""
        if len(self.output.token_ids) == self.max_tokens:
            return f"cut at --max-tokens {self.max_tokens}"
        return "cut as the context is full"

    def take(self, output: CompletionOutput, seconds: float) -> None:
        self.output = replace(output, finish_reason=output.finish_reason or "abort")
        self.segments += output.segments
        self.seconds = seconds


@dataclass
class TimedBatch:
    """Answers in the order of the prompts.

    Attributes:
        seconds: time of the run.
        outlook: whether drafts pay, as the engine saw it at the end.
        tree: bounds of the draft trees, as they stand beside a tau; empty without drafts.
    """

    answers: list[TimedAnswer]
    seconds: float = 0.0
    interrupted: bool = False
    outlook: DraftOutlook | None = None
    tree: str = ""

    @property
    def tokens(self) -> int:
        return sum(len(answer.output.token_ids) for answer in self.answers)

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def stats(self) -> SpeculationStats:
        """Sums over all answers."""
        return SpeculationStats.total(answer.output.stats for answer in self.answers)


def run_batch(
    llm: "LLM",
    prompts: Sequence[str | list[int]],
    params: Sequence[SamplingParams],
    what: str,
    listen: Callable[[int, RequestOutput], None] = lambda *_: None,
    trace: bool = False,
) -> TimedBatch:
    """Run all prompts together, with a progress bar. Ctrl-C ends the run and keeps its outputs so far.

    Args:
        what: stands beside the bar.
        listen: is called with the number of the prompt, from 0, and every state of its request.
        trace: let answers hold all their steps with the draft trees.

    Raises:
        ValueError: a prompt that cannot be run; nothing has run then.
    """
    batch = TimedBatch([TimedAnswer(max_tokens=one.max_tokens) for one in params], tree=llm.config.tree_in_words)
    start = time.perf_counter()
    try:
        bar = progress_bar(len(prompts), what, figures=lambda: batch.stats, tree=batch.tree)
        with closing(llm.numbered_stream(prompts, params, trace=trace)) as states, bar as advance:
            for number, output in states:
                batch.answers[number].take(output.outputs[0], time.perf_counter() - start)
                listen(number, output)
                if output.finished:
                    advance()
    except KeyboardInterrupt:
        batch.interrupted = True
    batch.seconds = time.perf_counter() - start
    batch.outlook = llm.stats().outlook
    for answer in batch.answers:
        if answer.output.finish_reason == "abort":
            answer.seconds = batch.seconds
    return batch


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
