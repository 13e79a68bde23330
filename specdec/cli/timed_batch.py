"""A batch of prompts, run to its end or to Ctrl-C, with its timings."""

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
