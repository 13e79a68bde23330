"""Adaptive trees against plain decoding and against trees of every fixed size, by batch size and text.

    python -m benchmarks.never_slower --minutes 20
    python -m benchmarks.never_slower --model FOLDER/target --draft FOLDER/eagle3 --name never_slower_wide
    python -m benchmarks.never_slower --model smollm2 --draft HEAD --dataset FILE --name never_slower_smollm2

FOLDER is what `python -m benchmarks.widen` wrote, FILE Spec-Bench's, whose kinds take turns. A cell is a text and a
batch size. As many requests run at any time, of a half to one and a half times `--max-tokens`, the same in every mode:
with equal lengths, plain decoding would end its requests together and read the next prompts in one step, which no load
of a server does. A run ends after 85 % of all tokens: then every mode has read all prompts. The others are plain
decoding by an engine without a head, and trees of each fixed size. Adaptive trees begin every run as in a new engine,
with the costs measured at start and the values that the head ships, so their time includes learning.

A machine's speed changes within seconds, so the modes of a cell run side by side, each in an engine of its own: a
tenth of a second of one, then of the next. Rounds go through all cells until the time is over, each with new engines:
where their weights lie in memory changes a small model's speed by some percent. Figures are medians over rounds; the
ratio's is of the rounds' own ratios. Goal: adaptive trees reach 0.97 of the best of the others in every cell.
"""

import argparse
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import read_prompts, write
from specdec import LLM, SamplingParams, Speculation
from specdec.bench.environment import shown_path
from specdec.bench.prompt_file import read_prompt_file
from specdec.config import DEMO, DEMO_HEAD
from specdec.core.garbage import exempt
from specdec.scheduling.rank_values import read_values
from specdec.scheduling.tree_sizer import TreeSizer

FILES = ("gsm8k-eval", "sgd-eval")
GOAL = 0.97
# Part of a run's tokens after which it ends.
SHARE = 0.85
# Seconds of one mode before the next one's turn.
SLICE = 0.1
ADAPTIVE, PLAIN = "adaptive", "plain"


class Mode:
    """A way to decode, in an engine of its own.

    Args:
        name: "plain", "adaptive" or a number of nodes.
        draft: the head's folder.
    """

    def __init__(self, name: str, model: str, draft: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.llm = LLM(model, None if name == PLAIN else draft, adaptive_drafts=name == ADAPTIVE, **settings)
        self._costs = deepcopy(self.llm.engine.scheduler.step_cost)

    def _forget(self) -> None:
        """Make adaptive trees begin as in a new engine."""
        scheduler, folder = self.llm.engine.scheduler, self.llm.config.draft
        assert self._costs is not None
        assert folder is not None
        cost = scheduler.step_cost = deepcopy(self._costs)
        sizer = TreeSizer(cost, scheduler.draft_budget.shape, prior=read_values(folder))
        scheduler.draft_budget = replace(scheduler.draft_budget, tree_sizer=sizer)

    def run(self, prompts: Sequence[list[int]], params: SamplingParams, batch: int) -> Iterator[float]:
        """Run the requests, `batch` at a time, up to `SHARE` of their tokens.

        Yields:
            After each slice, the seconds per token up to there, of this mode's slices alone.
        """
        if self.name == ADAPTIVE:
            self._forget()
        elif self.name != PLAIN:
            params = replace(params, speculation=Speculation(max_nodes=int(self.name)))
        draw, most, engine = random.Random(0), params.max_tokens or 1, self.llm.engine
        own = [replace(params, max_tokens=draw.randint(most // 2, most * 3 // 2)) for _ in prompts]
        requests = [
            self.llm.engine.new_group(self.llm.request_maker.add(prompt, each)).requests[0]
            for prompt, each in zip(prompts, own, strict=True)
        ]
        left, running, before = list(requests), 0, engine.scheduler.stats().generated_tokens
        wanted = SHARE * sum(each.max_tokens or 1 for each in own)
        tokens, seconds = 0, 0.0
        while tokens < wanted:
            start = time.perf_counter()
            while tokens < wanted and time.perf_counter() < start + SLICE:
                while left and running < batch:
                    engine.scheduler.add(left.pop())
                    running += 1
                running -= sum(request.finished for request in engine.step())
                tokens = engine.scheduler.stats().generated_tokens - before
            seconds += time.perf_counter() - start
            yield seconds / max(tokens, 1)
        for request in requests:
            engine.scheduler.abort(request)
        while engine.has_unfinished:
            engine.step()


def in_turns(file: Path) -> list[list[dict[str, str]]]:
    """Return the prompts of a file as conversations: one of each category, then the next of each."""
    by_category: dict[str, list[list[dict[str, str]]]] = defaultdict(list)
    for prompt in read_prompt_file(file, False, "--dataset", is_dataset=True):
        by_category[prompt.category].append(prompt.messages or [{"role": "user", "content": prompt.text}])
    return [prompt for turn in zip_longest(*by_category.values()) for prompt in turn if prompt is not None]


def side_by_side(
    modes: Sequence[Mode], prompts: Sequence[list[int]], params: SamplingParams, batch: int
) -> dict[str, float]:
    """Return the seconds per token of each mode, in slices that take turns."""
    seconds = dict[str, float]()
    running = {mode.name: mode.run(prompts, params, batch) for mode in modes}
    while running:
        for name, run in list(running.items()):
            found = next(run, None)
            if found is None:
                del running[name]
            else:
                seconds[name] = found
    return seconds


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
    parser.add_argument("--dataset", type=Path, nargs="*", help="prompts as `specdec bench` reads them")
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
    names = [PLAIN, *map(str, args.sizes), ADAPTIVE]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    seconds: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    end, rounds = time.perf_counter() + 60 * args.minutes, 0
    modes = list[Mode]()
    given = {file.stem: in_turns(file) for file in args.dataset or ()}
    texts = given or {name: read_prompts(name) for name in FILES}
    while rounds == 0 or time.perf_counter() < end:
        modes.clear()
        gc.unfreeze()
        gc.collect()
        # Each round begins with another mode, whose engine is made first: later ones find less memory in large pages.
        turn = rounds % len(names)
        modes += [Mode(name, args.model, args.draft, settings) for name in names[turn:] + names[:turn]]
        # As engine processes do.
        exempt()
        plain, adaptive = (next(mode.llm for mode in modes if mode.name == name) for name in (PLAIN, ADAPTIVE))
        prompts = {name: [plain.chat_prompt(messages) for messages in text] for name, text in texts.items()}
        side_by_side(modes, next(iter(prompts.values()))[:4], params, 4)
        for text in texts:
            for batch in args.batches:
                own = (prompts[text] * 3)[: max(args.requests, 3 * batch)]
                for name, each in side_by_side(modes, own, params, batch).items():
                    seconds[text, batch][name].append(each)
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
            "dtype": plain.config.dtype,
            "kernels": plain.engine.worker.cache.kernels.name,
            "shape": vars(adaptive.config.shape),
            "max_tokens": args.max_tokens,
            "rounds": rounds,
            "goal": GOAL,
            "cells_below_goal": sum(cell["ratio"] < GOAL for cell in cells),
            "cells": cells,
        },
    )


if __name__ == "__main__":
    main()
