"""Time from the command to the first token: a model's GGUF file, and the same model as a folder.

    python -m benchmarks.start [--gguf FILE] [--folder FOLDER]

Both run `specdec generate --max-tokens 1` in turn, each time in a new process. Seconds of the processor are those of
all threads; on a machine that does other work as well they say more than those of the clock. Without paths, SmolLM2 is
fetched as `benchmarks.smollm2` does.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.report import write
from benchmarks.smollm2 import DEFAULT_FOLDER, smollm2, smollm2_gguf

ROOT = Path(__file__).parents[1]


def start_seconds(model: Path) -> tuple[float, float]:
    """Return seconds of the clock and of the processor of one start."""
    command = [sys.executable, "-m", "specdec", "generate", "hi", "--model", str(model), "--draft", "none"]
    before, start = os.times(), time.perf_counter()
    subprocess.run([*command, "--max-tokens", "1"], check=True, cwd=ROOT, capture_output=True)
    seconds, after = time.perf_counter() - start, os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="default: SmolLM2-135M-Instruct in Q4_1")
    parser.add_argument("--folder", type=Path, help="default: the same in bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    file = args.gguf or smollm2_gguf(DEFAULT_FOLDER.with_suffix(".gguf"))
    models = {"gguf": file.resolve(), "folder": (args.folder or smollm2(DEFAULT_FOLDER)).resolve()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(args.rounds):
        for name, model in models.items():
            taken[name].append(start_seconds(model))
    figures = {}
    for name, each in taken.items():
        for kind, seconds in zip(("seconds", "processor_seconds"), zip(*each, strict=True), strict=True):
            figures[f"{kind}_{name}"] = round(statistics.median(seconds), 2)
    table = Table(*figures)
    table.add_row(*(str(figure) for figure in figures.values()))
    Console().print(table)
    write("start", {"rounds": args.rounds, "processors": os.cpu_count(), "gguf": file.name, **figures})


if __name__ == "__main__":
    main()
