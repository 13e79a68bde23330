"""Replicas and their router on simpy's virtual clock: what an engine's steps cost, and nothing of what they compute."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from benchmarks.arrival_trace import Arrival
from benchmarks.capacity import Costs
from specdec.ray_serve.prefix_table import PrefixTable

BLOCK = 16
# Bytes that travel per token of a prompt.
TOKEN_BYTES = 4


@dataclass
class Job:
    """A request.

    Attributes:
        blocks: names of the prompt's full blocks; equal ones are equal from the beginning on.
        cached: prompt tokens found in the replica's cache.
        first, end: seconds at which its first and its last token came.
    """

    arrival: Arrival
    blocks: list[bytes]
    cached: int = 0
    uncomputed: int = 0
    tokens: float = 0.0
    first: float = 0.0
    end: float = 0.0

    @property
    def size(self) -> int:
        """Tokens of the prompt."""
        return self.arrival.prefix + self.arrival.question


@dataclass(frozen=True)
class Engine:
    """Limits of a replica.

    Attributes:
        seats: most requests running at once.
        budget: most tokens of a step.
        stretch: how many times as long a prompt may make a step in which others decode.
        capacity: blocks of its cache.
    """

    seats: int
    budget: int
    stretch: float
    capacity: int


@dataclass
class Replica:
    """An engine that steps while it has requests."""

    env: simpy.Environment
    costs: Costs
    engine: Engine
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    cache: dict[bytes, None] = field(default_factory=dict)
    busy: float = 0.0

    def __post_init__(self) -> None:
        self._wake = self.env.event()
        self.env.process(self._run())

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, job: Job) -> None:
        """Queue a request."""
        self.waiting.append(job)
        if not self._wake.triggered:
            self._wake.succeed()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if not self.load:
                self._wake = self.env.event()
                yield self._wake
            while self.waiting and len(self.running) < self.engine.seats:
                self._admit(self.waiting.popleft())
            decoding = [job for job in self.running if not job.uncomputed]
            chunks = self._chunks(len(decoding))
            seconds = self.costs.step(len(decoding), sum(size for _, size in chunks))
            yield self.env.timeout(seconds)
            self.busy += seconds
            each = self.costs.tokens_per_row(len(decoding))
            for job in decoding:
                job.tokens += each
            for job, size in chunks:
                job.uncomputed -= size
                if not job.uncomputed:
                    job.first, job.tokens = self.env.now, 1.0
                    self._publish(job.blocks)
            for job in [job for job in self.running if job.tokens >= job.arrival.answer]:
                self.running.remove(job)
                job.end = self.env.now

    def _admit(self, job: Job) -> None:
        found = next((index for index, block in enumerate(job.blocks) if block not in self.cache), len(job.blocks))
        # The last token is always computed.
        job.cached = min(found * BLOCK, job.size - 1)
        job.uncomputed = job.size - job.cached
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


def jobs_of(trace: Sequence[Arrival], copies: int, speed: float) -> list[Job]:
    """Return the requests of several copies of a trace, which share no prefixes, in the order of their arrival.

    Args:
        speed: arrivals per second over those of the trace.
    """
    last = max(each.at for each in trace)
    jobs = []
    for copy in range(copies):
        for index, each in enumerate(trace):
            # Copies begin at different places of the trace, so that their bursts do not coincide.
            at = (each.at + last * copy / copies) % last / speed
            shared, whole = each.prefix // BLOCK, (each.prefix + each.question) // BLOCK
            blocks = [f"{copy}/{each.group}/{number}".encode() for number in range(shared)]
            blocks += [f"{copy}/{each.group}/{index}/{number}".encode() for number in range(shared, whole)]
            jobs.append(Job(Arrival(at, each.group, each.prefix, each.question, each.answer), blocks))
    return sorted(jobs, key=lambda job: job.arrival.at)


def job_seconds(job: Job) -> tuple[float, float]:
    """Return the seconds from a request's arrival to its first and to its last token."""
    return job.first - job.arrival.at, job.end - job.arrival.at


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
            yield env.timeout(max(0.0, job.arrival.at - env.now))
            name = choose(job, {name: replica.load for name, replica in replicas.items()})
            env.process(send(job, name))

    env.process(arrive())
    env.run()
    assert all(job.end for job in jobs)
    return float(sum(replica.busy for replica in replicas.values()) / (num_replicas * env.now))
