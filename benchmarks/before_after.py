"""Two trees of this repository: tokens a second at several numbers of rows, start-up, and memory at load.

    python -m benchmarks.before_after --before TREE [--model FOLDER --draft FOLDER]

With one process and with two tensor-parallel ranks, plain and with a draft head. Each tree's engine is a process of its
own; they answer in turn, round after round, and the other one waits meanwhile. Two processes of one tree differ by
several percent, as what an engine measures at its start decides its trees; so both begin anew several times. The
figures to read are the ratios of this tree to the other: medians over all rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import write

ROWS = (1, 8, 32)
TOKENS, PROMPT = 64, 24
# It runs in each tree, so that it uses what both have.
ENGINE = """
import json, resource, sys, time
from specdec import LLM, SamplingParams

settings = json.loads(sys.argv[1])
llm = LLM(settings.pop("model"), settings.pop("draft"), **settings)
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), flush=True)
for line in sys.stdin:
    rows, tokens, length = json.loads(line)
    prompts = [[5 + (7 * row + i) % 90 for i in range(length)] for row in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    print(json.dumps(rows * tokens / (time.perf_counter() - start)), flush=True)
"""


class Engine:
    """An engine of a tree, in a process of its own.

    Attributes:
        seconds: from the start of its process until it is ready.
        peak: of its resident memory until then, MiB.
    """

    def __init__(self, tree: Path, settings: dict[str, Any]) -> None:
        began, command = time.perf_counter(), [sys.executable, "-c", ENGINE, json.dumps(settings)]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        self._process: Any = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.peak = self._answer()
        self.seconds = time.perf_counter() - began

    def run(self, rows: int) -> float:
        """Return tokens a second."""
        self._process.stdin.write(json.dumps([rows, TOKENS, PROMPT]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        line = self._process.stdout.readline()
        assert line, "the engine has ended"
        return float(json.loads(line))

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        self._process.wait()


def compare(trees: dict[str, Path], settings: dict[str, Any], starts: int, rounds: int) -> dict[str, Any]:
    """Return medians of both trees, and ratios of the first to the second."""
    found: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in trees}
    seconds, peaks = ({name: list[float]() for name in trees} for _ in range(2))
    for start in range(starts):
        engines = {}
        # Each goes first as often as second.
        for name in sorted(trees, reverse=bool(start % 2)):
            engines[name] = Engine(trees[name], settings)
            seconds[name].append(engines[name].seconds)
            peaks[name].append(engines[name].peak)
        for each in range(rounds + 1):
            for rows in ROWS:
                for name in sorted(engines, reverse=bool((start + each) % 2)):
                    speed = engines[name].run(rows)
                    # The first round warms up.
                    if each:
                        found[name][rows].append(speed)
        for engine in engines.values():
            engine.close()
    now, before = trees
    speeds = {name: {rows: round(median(own[rows]), 1) for rows in ROWS} for name, own in found.items()}
    ratios = {
        rows: round(median(a / b for a, b in zip(found[now][rows], found[before][rows], strict=True)), 3)
        for rows in ROWS
    }
    return {
        "settings": settings,
        "ratios": ratios,
        "tokens_per_second": speeds,
        "seconds_to_start": {name: round(median(own), 2) for name, own in seconds.items()},
        "peak_mib": {name: round(median(own)) for name, own in peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a tree of this repository, with its library built")
    parser.add_argument("--model", help="the target; the demo model if it is left out")
    parser.add_argument("--draft", default="eagle", help="the draft head")
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3, help="of each start")
    args = parser.parse_args()
    trees = {"now": Path(__file__).parents[1], "before": args.before.resolve()}
    runs: list[dict[str, Any]] = []
    table = Table("ranks", "draft", *(f"{rows} rows" for rows in ROWS), "start, s", "memory, MiB")
    for ranks in (1, 2):
        for draft in (None, args.draft):
            settings = {"model": args.model, "draft": draft, "max_num_seqs": max(ROWS), "tensor_parallel_size": ranks}
            runs.append(compare(trees, settings, args.starts, args.rounds))
            own = runs[-1]
            pairs = [f"{own[name]['now']} / {own[name]['before']}" for name in ("seconds_to_start", "peak_mib")]
            table.add_row(str(ranks), draft or "none", *map(str, own["ratios"].values()), *pairs)
    Console().print(table)
    write(
        "before_after", {"starts": args.starts, "rounds": args.rounds, "tokens": TOKENS, "prompt": PROMPT, "runs": runs}
    )


if __name__ == "__main__":
    main()
