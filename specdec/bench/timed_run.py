"""Timed runs of requests on an engine, and rounds of several engines."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.core.commands import Abort, Add
from specdec.core.outputs import SpeculationStats
from specdec.core.request import Request, RequestGroup
from specdec.core.sampling_params import SamplingParams
from specdec.llm import LLM


@dataclass(frozen=True)
class TimedSample:
    """Answer to one prompt.

    Attributes:
        token_ids: the generated tokens.
        first: seconds from the prompt's arrival to the first token.
        seconds: seconds from its arrival to the last token.
        stats: speculation figures; no steps where the engine does not tell them.
    """

    token_ids: list[int]
    first: float
    seconds: float
    stats: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(frozen=True)
class TimedRun:
    """Answers in the order of the prompts, and the seconds until the last one ended."""

    samples: list[TimedSample]
    seconds: float

    @property
    def tok_per_s(self) -> float:
        """Generated tokens per second."""
        return sum(len(sample.token_ids) for sample in self.samples) / self.seconds


class Contender(Protocol):
    """An engine of a comparison."""

    def run(self, prompts: Sequence[list[int]], arrivals: Sequence[float] | None = None) -> TimedRun:
        """Answer prompts.

        Args:
            prompts: one, or several that run together.
            arrivals: when each arrives, in ascending seconds from the start; None for all at once.
        """
        ...


@dataclass
class EngineContender:
    """The engine in one mode, with the sampling parameters of every request."""

    llm: LLM
    params: SamplingParams
    # Prompts of a round: one that comes again begins the next, which profits from no text of those before.
    _seen: set[tuple[int, ...]] = field(default_factory=set)
    _round: int = 0

    def run(self, prompts: Sequence[list[int]], arrivals: Sequence[float] | None = None) -> TimedRun:
        """Answer prompts, as described in `Contender`.

        Raises:
            ValueError: a prompt that cannot be run, or that failed.
        """
        maker, times = self.llm.request_maker, arrivals or [0.0] * len(prompts)
        own = set(map(tuple, prompts))
        if own & self._seen:
            self._seen, self._round = set(), self._round + 1
        self._seen |= own
        adds = [maker.add(prompt, self.params, cache_salt=f"round {self._round}") for prompt in prompts]
        groups: list[RequestGroup] = []
        try:
            firsts, ends, seconds = self._run(adds, times, groups)
        finally:
            for group in groups:
                if not group.finished:
                    self.llm.engine.handle(Abort(group.request_id))
        requests = [group.requests[0] for group in groups]
        for request in requests:
            if request.error:
                raise ValueError(f"the prompt of {request.num_prompt} tokens failed: {request.error}")
        samples = [
            TimedSample(
                request.token_ids[request.num_prompt :], firsts[request] - at, ends[request] - at, request.stats
            )
            for request, at in zip(requests, times, strict=True)
        ]
        return TimedRun(samples, seconds)

    def _run(
        self, adds: Sequence[Add], times: Sequence[float], groups: list[RequestGroup]
    ) -> tuple[dict[Request, float], dict[Request, float], float]:
        """Return the time of each request's first and last token, and the whole run's.

        Args:
            groups: gets the requests of each command.
        """
        engine = self.llm.engine
        firsts: dict[Request, float] = {}
        ends: dict[Request, float] = {}
        start = time.perf_counter()
        while len(groups) < len(adds) or engine.has_unfinished:
            now = time.perf_counter() - start
            while len(groups) < len(adds) and times[len(groups)] <= now:
                groups.append(engine.handle(adds[len(groups)]))
            if not engine.has_unfinished:
                time.sleep(times[len(groups)] - now)
                continue
            updated = engine.step()
            now = time.perf_counter() - start
            for request in updated:
                firsts.setdefault(request, now)
                ends[request] = now
        return firsts, ends, time.perf_counter() - start


def run_rounds(
    contenders: Mapping[str, Contender],
    batches: Sequence[Sequence[list[int]]],
    rounds: int,
    warmup: int,
    arrivals: Callable[[int], Sequence[float]] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[TimedRun]]:
    """Run every batch of prompts with every contender, in each round.

    They are interleaved, so that a slow moment of the machine meets all of them: a batch is run by one contender after
    the other, before the next batch begins. Their order is reversed from batch to batch and from round to round.

    Args:
        contenders: by label.
        batches: prompts that run together.
        rounds: number of measured rounds.
        warmup: number of rounds before them that are not measured.
        arrivals: returns when the prompts of a batch arrive, by the number of the round.
        advance: is called after every run.

    Returns:
        By label a run of all prompts for each measured round. Its seconds are those in which the contender worked.
    """
    measured: dict[str, list[TimedRun]] = {label: [] for label in contenders}
    for number in range(-warmup, rounds):
        samples: dict[str, list[TimedSample]] = {label: [] for label in contenders}
        seconds = dict.fromkeys(contenders, 0.0)
        for index, batch in enumerate(batches):
            order = list(contenders)[:: -1 if (number + index) % 2 else 1]
            for label in order:
                run = contenders[label].run(batch, arrivals(number) if arrivals else None)
                samples[label] += run.samples
                seconds[label] += run.seconds
                advance()
        if number >= 0:
            for label, rows in measured.items():
                rows.append(TimedRun(samples[label], seconds[label]))
    return measured
