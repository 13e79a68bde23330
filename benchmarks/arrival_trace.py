"""Arrivals of requests for `benchmarks.simulate`, which sends them to a real server.

    python -m benchmarks.arrival_trace

writes `traces/bursty.jsonl`. Recorded traces (`benchmarks.recorded_trace`) have prompts that the demo model has no
positions for, so this one is drawn, once, with a fixed seed: 160 requests in 18 seconds, in bursts (a Poisson process
that changes between 1 and 12 arrivals a second, for 4 seconds on average), to 10 shared prefixes of unequal popularity
(Zipf), with lengths of a chat: a shared prefix of 256 to 768 tokens, a question of 16 to 256, an answer of 16 to 96.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TRACE = Path(__file__).parent / "traces" / "bursty.jsonl"
SEED, REQUESTS, GROUPS = 20261123, 160, 10
# Arrivals per second in quiet and in busy times, and seconds of either on average.
RATES, DWELL = (1.0, 12.0), 4.0


@dataclass(frozen=True)
class TracedRequest:
    """One request of any trace, as the simulation needs it.

    Attributes:
        at: seconds from the beginning.
        size, answer: tokens of prompt and output.
        blocks: names of the prompt's full blocks; equal ones are equal from the beginning of the prompt on.
    """

    at: float
    size: int
    answer: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Arrival:
    """One request.

    Attributes:
        at: seconds from the beginning.
        group: names the prefix that it shares.
        prefix, question, answer: tokens of the shared prefix, of the prompt behind it, and of the output.
    """

    at: float
    group: int
    prefix: int
    question: int
    answer: int


def read(file: Path = TRACE) -> list[Arrival]:
    """Return the arrivals of a trace, in order."""
    return [Arrival(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def traced(trace: Sequence[Arrival], block: int) -> list[TracedRequest]:
    """Return the requests, each with the names of the full blocks of its prompt.

    Args:
        block: tokens of a block.
    """
    found = []
    for index, each in enumerate(trace):
        shared, size = each.prefix // block, each.prefix + each.question
        blocks = [f"{each.group}/{number}" for number in range(shared)]
        blocks += [f"{each.group}/{index}/{number}" for number in range(shared, size // block)]
        found.append(TracedRequest(each.at, size, each.answer, tuple(blocks)))
    return found


def draw() -> list[Arrival]:
    """Return the committed trace."""
    chance = random.Random(SEED)
    prefixes = [chance.randrange(256, 769) for _ in range(GROUPS)]
    popularity = [1 / (rank + 1) for rank in range(GROUPS)]
    at, is_busy, until = 0.0, False, chance.expovariate(1 / DWELL)
    arrivals = list[Arrival]()
    while len(arrivals) < REQUESTS:
        gap = chance.expovariate(RATES[is_busy])
        if at + gap > until:
            # The process has no memory: the gap is drawn anew at the new rate.
            at, is_busy, until = until, not is_busy, until + chance.expovariate(1 / DWELL)
            continue
        at += gap
        (group,) = chance.choices(range(GROUPS), popularity)
        arrivals.append(
            Arrival(round(at, 3), group, prefixes[group], chance.randrange(16, 257), chance.randrange(16, 97))
        )
    return arrivals


if __name__ == "__main__":
    TRACE.parent.mkdir(exist_ok=True)
    TRACE.write_text("".join(json.dumps(asdict(each)) + "\n" for each in draw()), encoding="utf-8")
