"""Tokens a second of training by what torch's threads do while they wait, on a machine that others may use.

python -m benchmarks.training_threads

An EAGLE-3 head of the demo target with the default settings. Every measurement is a process of its own; the ways take
turns. Waiting threads spin by OpenMP's own default, and sleep in `specdec train`. The processor time per token tells
spinning from work, whatever else the machine does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import write
from benchmarks.training import prepare_data

# By name: what waiting threads do, and how many there are; None for as many as torch takes.
WAYS = {
    "spin": ("ACTIVE", None),
    "sleep": ("PASSIVE", None),
    "one thread": ("PASSIVE", 1),
}
CHILD = "--child"


def measure(data: Path, out: Path, steps: int, threads: int | None) -> dict[str, Any]:
    """Take some steps of a run."""
    import torch

    from specdec.config import DEMO
    from specdec.train_eagle.training.read_config import read_config
    from specdec.train_eagle.training.train_run import TrainingRun

    own = {"model": DEMO / "target", "data": [data], "out": out, "evaluate_prompts": 0, "threads": threads}
    run = TrainingRun(read_config({**own, "tracker": "none"}))
    run.step(0)
    tokens = sum(run.source.lengths[i] for step in range(1, steps + 1) for i in run.batches[step])
    began, busy = time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        run.step(step)
    return {
        "threads": torch.get_num_threads(),
        "tokens_per_s": round(tokens / (time.perf_counter() - began), 1),
        "cpu_ms_per_token": round(1000 * (time.process_time() - busy) / tokens, 3),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed in each, after one that is not")
    parser.add_argument("--answers", type=int, default=100)
    parser.add_argument(CHILD, nargs=3, metavar=("WAY", "DATA", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, data, out = args.child
        print(json.dumps(measure(Path(data), Path(out), args.steps, WAYS[way][1])))
        return
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_data(Path(folder), args.answers)
        for number in range(args.rounds):
            for way, rows in found.items():
                words = [sys.executable, "-m", "benchmarks.training_threads", "--steps", str(args.steps), CHILD]
                words += [way, str(data), str(Path(folder) / f"{way}-{number}")]
                environment = {**others, "OMP_WAIT_POLICY": WAYS[way][0]}
                done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(way, rows[-1], flush=True)
    table = Table("waiting threads", "threads", "tokens / s", "processor ms a token", "load")
    rows = []
    for way, runs in found.items():
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        table.add_row(way, *(f"{value:,.2f}" for value in medians.values()))
        rows.append({"way": way, "wait_policy": WAYS[way][0], **medians, "runs": runs})
    Console().print(table)
    write("training_threads", {"rows": rows})


if __name__ == "__main__":
    main()
