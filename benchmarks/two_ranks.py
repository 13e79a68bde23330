"""Tokens a second of two tensor-parallel ranks, at 1, 8 and 32 rows, beside another tree of this repository.

python -m benchmarks.two_ranks --model FOLDER --before TREE

Each tree's engine is a process of its own; they answer in turn, round after round, and the other one waits meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import write

ROWS = (1, 8, 32)
ROUNDS, TOKENS, PROMPT = 8, 64, 24
# It runs in each tree, so that it uses what both have.
ENGINE = """
import json, sys, time
from specdec import LLM, SamplingParams

settings = json.loads(sys.argv[1])
llm = LLM(settings.pop("model"), settings.pop("draft"), **settings)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    rows, tokens, prompt = json.loads(line)
    prompts = [[5 + (7 * row + i) % 90 for i in range(prompt)] for row in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    print(json.dumps(rows * tokens / (time.perf_counter() - start)), flush=True)
"""


class Engine:
    """An engine of a tree, in a process of its own."""

    def __init__(self, tree: Path, settings: dict[str, Any]) -> None:
        command = [sys.executable, "-c", ENGINE, json.dumps(settings)]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        self._process: Any = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def run(self, rows: int) -> float:
        """Return tokens a second."""
        self._process.stdin.write(json.dumps([rows, TOKENS, PROMPT]) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        assert line, "the engine has ended"
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="the target; left out for the demo model")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--before", type=Path, required=True, help="a tree of this repository, with its library built")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    settings = {"model": args.model, "draft": args.draft, "tensor_parallel_size": 2, "max_num_seqs": max(ROWS)}
    trees = {"before": args.before, "now": Path(__file__).parents[1]}
    engines = {name: Engine(tree.resolve(), settings) for name, tree in trees.items()}
    found: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in engines}
    for each in range(args.rounds + 1):
        for rows in ROWS:
            # Each goes first as often as second.
            for name in sorted(engines, reverse=bool(each % 2)):
                speed = engines[name].run(rows)
                # The first round warms up.
                if each:
                    found[name][rows].append(speed)
    for engine in engines.values():
        engine.close()
    rows_found = []
    for rows in ROWS:
        ratio = median(now / before for now, before in zip(found["now"][rows], found["before"][rows], strict=True))
        speeds = {name: round(median(found[name][rows]), 1) for name in engines}
        rows_found.append({"rows": rows, **speeds, "ratio": round(ratio, 3)})
        print(f"{rows:2d} rows: {speeds['before']:.1f} before, {speeds['now']:.1f} now, ratio {ratio:.3f}", flush=True)
    write("two_ranks", {**settings, "rounds": args.rounds, "tokens": TOKENS, "speeds": rows_found})


if __name__ == "__main__":
    main()
