"""Adaptive trees against plain decoding and against trees of every fixed size, by batch size and text.

    python -m benchmarks.never_slower --minutes 20
    python -m benchmarks.never_slower --model WIDENED --draft WIDENED_HEAD --name never_slower_wide --minutes 40

A cell is a text and a batch size. As many requests run at any time, of a half to one and a half times `--max-tokens`,
the same in every mode: with equal lengths, plain decoding would end its requests together and read the next prompts in
one step, which no load of a server does. A run ends after 85 % of all tokens: then every mode has read all prompts. The
others are plain decoding by an engine without a head, and trees of each fixed size. Adaptive trees begin every run as
in a new engine, with the costs measured at start and the values that the head ships, so their time includes learning.
Rounds go through all cells and runs until the time is over. Figures are medians over rounds; the ratio's is of the
rounds' own ratios. Goal: adaptive trees reach 0.97 of the best of the others in every cell.
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import read_prompts, write
from specdec import LLM, SamplingParams, Speculation
from specdec.bench.environment import shown_path
from specdec.config import DEMO, DEMO_HEAD
from specdec.scheduling.rank_values import read_values
from specdec.scheduling.step_cost import StepCost
from specdec.scheduling.tree_sizer import TreeSizer

FILES = ("gsm8k-eval", "sgd-eval")
GOAL = 0.97
# Part of a run's tokens after which it ends.
SHARE = 0.85
ADAPTIVE, PLAIN = "adaptive", "plain"


@dataclass
class Engines:
    """An engine without a head, one with trees of fixed sizes, and one with adaptive trees."""

    plain: LLM
    fixed: LLM
    adaptive: LLM
    costs: StepCost = field(init=False)

    def __post_init__(self) -> None:
        cost = self.adaptive.engine.scheduler.step_cost
        assert cost is not None
        self.costs = deepcopy(cost)

    def mode(self, name: str, params: SamplingParams) -> tuple[LLM, SamplingParams]:
        """Return a mode's engine, and its requests' parameters. `name` is "plain", "adaptive" or a number of nodes."""
        if name == PLAIN:
            return self.plain, params
        if name != ADAPTIVE:
            return self.fixed, replace(params, speculation=Speculation(max_nodes=int(name)))
        scheduler = self.adaptive.engine.scheduler
        assert scheduler.draft_budget is not None
        scheduler.step_cost = deepcopy(self.costs)
        folder = self.adaptive.config.draft
        assert folder is not None
        shape, values = scheduler.draft_budget.shape, read_values(folder)
        scheduler.tree_sizer = TreeSizer(scheduler.step_cost, shape, prior=values)
        scheduler.draft_budget = replace(scheduler.draft_budget, tree_sizer=scheduler.tree_sizer)
        return self.adaptive, params

    def seconds(self, name: str, prompts: Sequence[list[int]], params: SamplingParams, batch: int) -> float:
        """Return the seconds per token of the requests, `batch` at a time, up to `SHARE` of their tokens."""
        llm, params = self.mode(name, params)
        draw, most = random.Random(0), params.max_tokens or 1
        own = [replace(params, max_tokens=draw.randint(most // 2, most * 3 // 2)) for _ in prompts]
        engine = llm.engine
        requests = [llm.new_group(prompt, each).requests[0] for prompt, each in zip(prompts, own, strict=True)]
        left, running, before = list(requests), 0, engine.scheduler.stats().generated_tokens
        wanted = SHARE * sum(each.max_tokens or 1 for each in own)
        tokens, start = 0, time.perf_counter()
        while tokens < wanted:
            while left and running < batch:
                engine.add_request(left.pop())
                running += 1
            running -= sum(request.finished for request in engine.step())
            tokens = engine.scheduler.stats().generated_tokens - before
        seconds = time.perf_counter() - start
        for request in requests:
            engine.abort(request)
        while engine.has_unfinished:
            engine.step()
        return seconds / tokens


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return tokens a second of each mode, and of adaptive trees over the best of the others."""
    rates = {name: 1 / statistics.median(values) for name, values in seconds.items()}
    best = max((name for name in rates if name != ADAPTIVE), key=lambda name: rates[name])
    ratio = statistics.median(other / own for own, other in zip(seconds[ADAPTIVE], seconds[best], strict=True))
    over_plain = statistics.median(other / own for own, other in zip(seconds[ADAPTIVE], seconds[PLAIN], strict=True))
    return {
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "best": best,
        "ratio": round(ratio, 3),
        "over_plain": round(over_plain, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO / "target"), help="target folder")
    parser.add_argument("--draft", default=str(DEMO_HEAD), help="head folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8], help="nodes of fixed trees")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--requests", type=int, default=32, help="least requests of a run; a run has 3 for each row")
    parser.add_argument("--minutes", type=float, default=20.0, help="no round begins after this time")
    parser.add_argument("--name", default="never_slower", help="name of the result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings: Any = {"dtype": args.dtype, "enable_prefix_caching": False, "max_num_seqs": max(args.batches)}
    engines = Engines(
        LLM(args.model, None, **settings),
        LLM(args.model, args.draft, adaptive_drafts=False, **settings),
        LLM(args.model, args.draft, **settings),
    )
    prompts = {text: [engines.plain.chat_prompt(messages) for messages in read_prompts(text)] for text in FILES}
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    names = [PLAIN, *map(str, args.sizes), ADAPTIVE]
    seconds: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    end, rounds = time.perf_counter() + 60 * args.minutes, 0
    for name in names:
        engines.seconds(name, prompts[FILES[0]][:4], params, 4)
    while rounds == 0 or time.perf_counter() < end:
        for text in FILES:
            for batch in args.batches:
                own = (prompts[text] * 3)[: max(args.requests, 3 * batch)]
                # Each round begins with another mode.
                for place in range(len(names)):
                    name = names[(place + rounds) % len(names)]
                    seconds[text, batch][name].append(engines.seconds(name, own, params, batch))
        rounds += 1
    cells = []
    table = Table("text", "batch", *names, "best", "adaptive over best", "over plain")
    for (text, batch), values in seconds.items():
        found = summary(values)
        cells.append({"text": text, "batch": batch, **found})
        rates = [f"{found['tokens_per_second'][name]:.0f}" for name in names]
        table.add_row(text, str(batch), *rates, found["best"], f"{found['ratio']:.3f}", f"{found['over_plain']:.3f}")
    Console(width=140).print(table)
    write(
        args.name,
        {
            "model": shown_path(args.model),
            "dtype": engines.plain.config.dtype,
            "kernels": engines.plain.engine.worker.cache.kernels.name,
            "shape": vars(engines.adaptive.config.shape),
            "max_tokens": args.max_tokens,
            "rounds": rounds,
            "goal": GOAL,
            "cells_below_goal": sum(cell["ratio"] < GOAL for cell in cells),
            "cells": cells,
        },
    )


if __name__ == "__main__":
    main()
