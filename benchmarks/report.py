"""Shared parts of benchmarks: prompts, trees in turns, memory in use, and results with machine, versions and commit."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec import DraftShape
from specdec.bench.environment import environment

RESULTS = Path(__file__).parent / "results"
PROMPTS = Path(__file__).parent / "prompts"


def finish(
    name: str, figures: dict[str, Any], rows: Sequence[dict[str, Any]], shown: Sequence[str] | None = None
) -> None:
    """Print a table of rows, with their keys as headings, and `write` them after the other figures.

    Args:
        shown: keys in the table; None for all.

    Raises:
        SystemExit: as of `write`.
    """
    keys = shown or list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*(key.replace("_", " ") for key in keys))
    for row in rows:
        table.add_row(*(str(row.get(key, "")) for key in keys))
    Console().print(table)
    write(name, {**figures, "rows": rows})


def write(name: str, figures: dict[str, Any]) -> None:
    """Write `results/NAME.json` and print it as the last line.

    Figures of code that is in no commit are printed and not written: nobody could measure them again.

    Raises:
        SystemExit: the work tree has uncommitted changes, other than in `results/`.
    """
    document = {"benchmark": name, **environment(), **figures}
    file = RESULTS / f"{name}.json"
    if document["uncommitted_changes"]:
        print(json.dumps(document))
        raise SystemExit(f"{file}: not written: the work tree has uncommitted changes; commit them and run again")
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


def in_turns(file: str, words: Sequence[str], before: Path | None, rounds: int) -> dict[str, list[list[float]]]:
    """Run a program by the code of this tree and of another one in turns, each time in a process of its own.

    Args:
        file: the program, which may import what both trees have.
        words: its arguments.
        before: the other tree of this repository, with its library built; None for this one alone.

    Returns:
        By "now" and "before", the numbers that it has printed in each round.
    """
    trees = {"now": RESULTS.parents[1]} | ({"before": before.resolve()} if before else {})
    found: dict[str, list[list[float]]] = {name: [] for name in trees}
    for each in range(rounds):
        # Each goes first as often as second.
        for name in sorted(trees, reverse=bool(each % 2)):
            command, environment = [sys.executable, file, *words], {**os.environ, "PYTHONPATH": str(trees[name])}
            made = subprocess.run(command, env=environment, cwd=trees[name], check=True, capture_output=True, text=True)
            found[name].append([float(word) for word in made.stdout.split()])
    return found


def resident_mib() -> float:
    """Return the resident size of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`: the fifth size, hblkhd, is in use and mapped, the eighth, uordblks, in use else."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def in_use_mib() -> float:
    """Return the MiB that this process has allocated and not freed; 0 if the C library does not say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0.0
    mallinfo.restype = _Heap
    sizes = mallinfo().sizes
    return float(sizes[4] + sizes[7]) / 2**20


def read_prompts(name: str) -> list[list[dict[str, str]]]:
    """Conversations of `prompts/NAME.jsonl`, each ending with a user's turn."""
    lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def parse_shape(text: str) -> DraftShape:
    """`depth,branching,nodes` with or without `,min_reach`."""
    depth, branching, nodes, *reach = text.split(",")
    return DraftShape(int(depth), int(branching), int(nodes), *map(float, reach))
