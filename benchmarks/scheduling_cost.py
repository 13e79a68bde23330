"""Time of scheduling alone: no model, requests that decode, and blocks allocated and freed.

    python -m benchmarks.scheduling_cost

The clock runs around `schedule` and `update`; appending tokens is outside. "plain" rows have no drafts, "tree" rows
have a tree. "tree, queue" is the same while a request waits for blocks that are not free: every step checks whether it
can be admitted, and takes back the blocks that drafts hold. Goals: at most 1.5 ms per step at 256 running requests, a
cost that grows only with their number, and 100,000 pairs of allocate and free per second.
"""

import argparse
import random
import statistics
import sys
import time
from typing import Any

from benchmarks.report import finish, parse_shape
from specdec import DraftShape, SamplingParams
from specdec.cache.block_pool import BlockPool
from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.request import Request
from specdec.scheduling.draft_budget import DraftBudget
from specdec.scheduling.integrity import check_pool, check_scheduler
from specdec.scheduling.rank_values import TreeOutcome
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.scheduling.step_cost import Curve, StepCost
from specdec.scheduling.step_plan import RowResult
from specdec.scheduling.tree_sizer import TreeSizer
from specdec.text.detokenizer import Detokenizer
from specdec.verify.sampling import Sampling

BLOCK_SIZE = 16
MOST_ACCEPTED = 5
POOL_BLOCKS = 8192
HELD = 64
PAIRS = 100_000
# Trees are fitted to costs at which the largest repay.
CHEAP = StepCost(Curve([(1, 1e-3), (9, 1e-3)]))


def request(number: int, prompt: int, longest: int) -> Request:
    return Request(
        request_id=str(number),
        token_ids=[number, *range(prompt - 1)],
        num_prompt=prompt,
        params=SamplingParams(max_tokens=None),
        sampling=Sampling(),
        max_length=longest,
        end_tokens=frozenset(),
        detokenizer=Detokenizer(None, ()),
    )


def decoding(count: int, prompt: int, steps: int, shape: DraftShape | None, queue: bool) -> Scheduler:
    """`count` requests that decode, with room for `steps` more steps of each, and one that waits, if asked."""
    longest = prompt + (steps + 2) * (MOST_ACCEPTED + 1)
    slots = shape.slots if shape else 0
    config = SchedulerConfig(max_num_seqs=count + 1, max_num_batched_tokens=count * (prompt + slots + 1))
    manager = KVCacheManager(count * (-(-(longest + slots) // BLOCK_SIZE) + 1), BLOCK_SIZE)
    budget = DraftBudget(DraftShape(1, 1, 1), 0, 0)
    if shape is not None:
        budget = DraftBudget(shape, sys.maxsize, sys.maxsize, TreeSizer(CHEAP, shape))
    scheduler = Scheduler(manager, config, budget, CHEAP if shape else None)
    for number in range(count):
        scheduler.add(request(number, prompt, longest))
    step(scheduler, random.Random(0))
    if queue:
        # It needs all blocks there are.
        entries = manager.pool.num_blocks * BLOCK_SIZE
        scheduler.add(request(count, entries - 1, entries))
    assert len(scheduler.running) == count
    return scheduler


def step(scheduler: Scheduler, chance: random.Random) -> float:
    """A step that accepts 0 to 5 drafts a row; seconds spent in the scheduler."""
    start = time.perf_counter()
    plan = scheduler.schedule()
    seconds = time.perf_counter() - start
    paths = [range(chance.randint(0, min(MOST_ACCEPTED, row.max_depth))) for row in plan.rows]
    results = [
        RowResult(row.num_nodes, path=path, num_new=len(path) + 1, num_accepted=len(path))
        for row, path in zip(plan.rows, paths, strict=True)
    ]
    for row, result in zip(plan.rows, results, strict=True):
        row.request.token_ids += [chance.randrange(4096) for _ in range(result.num_new)]
    outcomes = [
        TreeOutcome(row.num_nodes, row.num_nodes, path, row.request.acceptance_history)
        for row, path in zip(plan.rows, paths, strict=True)
        if row.num_nodes
    ]
    start = time.perf_counter()
    scheduler.update(plan, results)
    if (sizer := scheduler.draft_budget.tree_sizer) is not None:
        sizer.learn(outcomes)
    return seconds + time.perf_counter() - start


def pairs_per_second(hashed: bool) -> float:
    """Blocks taken from a full round of the pool and given back, one at a time, 64 held at any moment."""
    pool = BlockPool(POOL_BLOCKS)
    names = [number.to_bytes(32, "big") for number in range(POOL_BLOCKS + PAIRS)]
    if hashed:
        blocks = pool.allocate(POOL_BLOCKS)
        for block, name in zip(blocks, names, strict=False):
            pool.register(block, name)
        pool.free(blocks)
    held = pool.allocate(HELD)
    start = time.perf_counter()
    for number in range(PAIRS):
        place = number % HELD
        pool.free([held[place]])
        (held[place],) = pool.allocate(1)
        if hashed:
            pool.register(held[place], names[POOL_BLOCKS + number])
    seconds = time.perf_counter() - start
    check_pool(pool, [held])
    return PAIRS / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--shape", default="6,10,60", help="depth,branching,nodes")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    shape = parse_shape(args.shape)
    kinds = {"plain": (None, False), "tree": (shape, False), "tree, queue": (shape, True)}
    cases = [(kind, count) for count in args.running for kind in kinds]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    pairs: dict[str, list[float]] = {"plain": [], "hashed": []}
    for round_number in range(args.rounds):
        for kind, count in cases:
            scheduler = decoding(count, args.prompt, args.steps, *kinds[kind])
            chance = random.Random(round_number)
            seconds[kind, count] += [step(scheduler, chance) for _ in range(args.steps)]
            assert len(scheduler.running) == count
            check_scheduler(scheduler)
        for kind in pairs:
            pairs[kind].append(pairs_per_second(kind == "hashed"))
    rows: list[dict[str, Any]] = []
    for kind, count in sorted(cases):
        ms = statistics.median(seconds[kind, count]) * 1e3
        cost = {"ms": round(ms, 3), "us_per_request": round(ms / count * 1e3, 2)}
        rows.append({"rows": kind, "running": count, **cost})
    ends = {kind: [row["us_per_request"] for row in rows if row["rows"] == kind] for kind in kinds}
    finish(
        "scheduling_cost",
        {
            "shape": args.shape,
            "prompt": args.prompt,
            "rounds": args.rounds,
            "steps_per_round": args.steps,
            "us_per_request_most_over_fewest_running": {kind: round(us[-1] / us[0], 2) for kind, us in ends.items()},
            "block_pairs_per_s": {kind: round(statistics.median(values)) for kind, values in pairs.items()},
        },
        rows,
    )


if __name__ == "__main__":
    main()
