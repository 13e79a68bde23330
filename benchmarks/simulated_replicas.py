"""Replicas and their router on simpy's virtual clock: what an engine's steps cost, and nothing of what they compute."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from benchmarks.arrival_trace import TracedRequest
from benchmarks.capacity import Costs
from specdec.kernels.types.integers import ceil_div
from specdec.ray_serve.prefix_table import PrefixTable

# Bytes that travel per token of a prompt.
TOKEN_BYTES = 4


@dataclass
class Job:
    """A request.

    Attributes:
        at: seconds at which it arrives.
        size, answer: tokens of prompt and output.
        blocks: names of the prompt's full blocks; equal ones are equal from the beginning on.
        cached: prompt tokens found in the replica's cache.
        first, end: seconds at which its first and its last token came.
    """

    at: float
    size: int
    answer: int
    blocks: list[bytes]
    cached: int = 0
    uncomputed: int = 0
    tokens: float = 0.0
    first: float = 0.0
    end: float = 0.0


@dataclass(frozen=True)
class Engine:
    """Limits of a replica.

    Attributes:
        seats: most requests running at once.
        budget: most tokens of a step.
        stretch: how many times as long a prompt may make a step in which others decode.
        capacity: blocks of its cache.
        block: tokens of a block.
    """

    seats: int
    budget: int
    stretch: float
    capacity: int
    block: int = 16

    def blocks_of(self, job: Job) -> int:
        """Return the blocks of a request's prompt and output."""
        return ceil_div(job.size + job.answer, self.block)


@dataclass
class Replica:
    """An engine that steps while it has requests.

    A request is admitted while there is a seat, and memory for its prompt and output beside those of the running ones;
    blocks that these share are counted for each. Steps that are alike are one event.
    """

    env: simpy.Environment
    costs: Costs
    engine: Engine
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    cache: dict[bytes, None] = field(default_factory=dict)
    busy: float = 0.0
    held: int = 0
    expected: int = 0

    def __post_init__(self) -> None:
        self._wake = self.env.event()
        self.env.process(self._run())

    @property
    def load(self) -> int:
        """Unfinished requests that were sent here, those on their way included."""
        return self.expected + len(self.waiting) + len(self.running)

    def add(self, job: Job) -> None:
        """Queue a request that was expected."""
        self.expected -= 1
        self.waiting.append(job)
        if not self._wake.triggered:
            self._wake.succeed()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if not self.waiting and not self.running:
                self._wake = self.env.event()
                yield self._wake
            while self.waiting and self._has_room(self.waiting[0]):
                self._admit(self.waiting.popleft())
            decoding = [job for job in self.running if not job.uncomputed]
            chunks = self._chunks(len(decoding))
            seconds = self.costs.step(len(decoding), sum(size for _, size in chunks))
            each = self.costs.tokens_per_row(len(decoding))
            left = [math.ceil((job.answer - job.tokens) / each) for job in decoding]
            left += [job.uncomputed // size for job, size in chunks]
            steps = yield from self._step(seconds, max(1, min(left)))
            self.busy += steps * seconds
            for job in decoding:
                job.tokens += steps * each
            for job, size in chunks:
                job.uncomputed -= steps * size
                if not job.uncomputed:
                    job.first, job.tokens = self.env.now, 1.0
                    self._publish(job.blocks)
            for job in [job for job in self.running if job.tokens >= job.answer]:
                self.running.remove(job)
                self.held -= self.engine.blocks_of(job)
                job.end = self.env.now

    def _step(self, seconds: float, most: int) -> Generator[simpy.Event, Any, int]:
        """Let steps pass, up to the one in which a request comes; return how many."""
        began, steps = self.env.now, most
        if most > 1:
            self._wake = self.env.event()
            yield self.env.timeout(most * seconds) | self._wake
            steps = min(most, max(1, math.ceil((self.env.now - began) / seconds - 1e-9)))
        yield self.env.timeout(max(0.0, began + steps * seconds - self.env.now))
        return steps

    def _has_room(self, job: Job) -> bool:
        fits = self.held + self.engine.blocks_of(job) <= self.engine.capacity
        return not self.running or (fits and len(self.running) < self.engine.seats)

    def _admit(self, job: Job) -> None:
        found = next((index for index, block in enumerate(job.blocks) if block not in self.cache), len(job.blocks))
        # The last token is always computed.
        job.cached = min(found * self.engine.block, job.size - 1)
        job.uncomputed = job.size - job.cached
        self.held += self.engine.blocks_of(job)
        self.running.append(job)

    def _chunks(self, num_decoding: int) -> list[tuple[Job, int]]:
        """Return the prompts of the next step, and their tokens in it."""
        left = most = self.engine.budget - num_decoding
        if num_decoding and self.engine.stretch:
            more = (self.engine.stretch - 1) * self.costs.step(num_decoding, 0)
            most = max(1, int(more / self.costs.token))
        chunks = list[tuple[Job, int]]()
        for job in self.running:
            size = min(job.uncomputed, most, left)
            if size > 0:
                chunks.append((job, size))
                left -= size
        return chunks

    def _publish(self, blocks: Sequence[bytes]) -> None:
        for block in reversed(blocks):
            self.cache.pop(block, None)
            self.cache[block] = None
        while len(self.cache) > self.engine.capacity:
            del self.cache[next(iter(self.cache))]


Policy = Callable[[Job, Mapping[str, int]], str]


def round_robin(names: Sequence[str]) -> Policy:
    """Return a policy that takes the replicas in turn."""
    turn = itertools.cycle(names)
    return lambda _, __: next(turn)


def by_prefix(capacity: int) -> Policy:
    """Return the policy of `specdec serve --replicas`."""
    table = PrefixTable(capacity)

    def choose(job: Job, loads: Mapping[str, int]) -> str:
        name = table.rank(job.blocks, loads)[0]
        table.note(name, job.blocks)
        return name

    return choose


def jobs_of(trace: Sequence[TracedRequest], copies: int, speed: float) -> list[Job]:
    """Return the requests of several copies of a trace, which share no prefixes, in the order of their arrival.

    Args:
        speed: arrivals per second over those of the trace.
    """
    # After its end a trace goes on with its beginning, at its mean rate.
    span = max(each.at for each in trace) * (1 + 1 / len(trace))
    jobs = []
    for copy in range(copies):
        names = {block: f"{copy}/{block}".encode() for each in trace for block in each.blocks}
        for each in trace:
            # Copies begin at different places of the trace, so that their bursts do not coincide.
            at = (each.at + span * copy / copies) % span / speed
            jobs.append(Job(at, each.size, each.answer, [names[block] for block in each.blocks]))
    return sorted(jobs, key=lambda job: job.at)


def job_seconds(job: Job) -> tuple[float, float]:
    """Return the seconds from a request's arrival to its first and to its last token."""
    return job.first - job.at, job.end - job.at


def figures(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return milliseconds: mean, median and nine in ten of the times to the first and to the last token."""
    found: dict[str, float] = {}
    for name, values in zip(("first", "last"), zip(*times, strict=True), strict=True):
        found[f"{name}_ms_mean"] = round(1000 * statistics.fmean(values), 1)
        found[f"{name}_ms_median"] = round(1000 * statistics.median(values), 1)
        found[f"{name}_ms_nine_in_ten"] = round(1000 * statistics.quantiles(values, n=10)[-1], 1)
    return found


def hit_share(jobs: Sequence[Job]) -> float:
    """Return the share of prompt tokens that were found in a cache."""
    return round(sum(job.cached for job in jobs) / sum(job.size for job in jobs), 3)


def simulate(jobs: Sequence[Job], num_replicas: int, costs: Costs, policy: str, engine: Engine) -> float:
    """Run requests to their ends; return the share of time in which replicas were busy.

    Args:
        policy: "prefix" or "round robin".
    """
    env = simpy.Environment()
    replicas = {f"r{index:02}": Replica(env, costs, engine) for index in range(num_replicas)}
    choose = by_prefix(engine.capacity) if policy == "prefix" else round_robin(list(replicas))

    def send(job: Job, name: str) -> Generator[simpy.Event, Any, None]:
        yield env.timeout(costs.overhead + costs.transfer(TOKEN_BYTES * job.size))
        replicas[name].add(job)

    def arrive() -> Generator[simpy.Event, Any, None]:
        for job in jobs:
            yield env.timeout(max(0.0, job.at - env.now))
            name = choose(job, {name: replica.load for name, replica in replicas.items()})
            replicas[name].expected += 1
            env.process(send(job, name))

    env.process(arrive())
    env.run()
    assert all(job.end for job in jobs)
    end = max(job.end for job in jobs)
    return float(sum(replica.busy for replica in replicas.values()) / (num_replicas * end))
