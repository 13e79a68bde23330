"""Every Triton kernel at the shapes of Llama-3.1-8B, against the machine's own copy and against torch.

A stage of `benchmarks.gpu.day`. Each call is held against its twin in plain torch and timed in turns with
its peers, as a CUDA graph behind a flush of the second-level cache; medians of rounds. Bytes are the fewest that a call
must read and write; what share of the copy's bandwidth that makes says how far it is from the bound. The time of
`one_number` is in every other. Attention of torch needs its keys gathered first: "gather" is the time of that, which
is in none of the others. What there was no time or memory for is listed.
"""

import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from rich.table import Table

from benchmarks.gpu import attention, operations, tree_search, walks
from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.race import Race, Subject, reason, rounded
from benchmarks.gpu.sizes import LLAMA_8B, TINY, Sizes
from benchmarks.gpu.stage import Stage

# What takes neither float32 nor a CPU.
ONLY_ON_GPU = "cudnn"


def run(stage: Stage) -> None:
    """Measure all. A wrong result of ours is a failure; in a rehearsal so is whatever is missing."""
    sizes = TINY if stage.rehearse else LLAMA_8B
    figures = measure(sizes, stage.device, stage.deadline, stage.show)
    stage.figures |= figures
    stage.table = table_of(figures["rows"])
    missing = figures["failed"] + (figures["cut"] if stage.rehearse else [])
    stage.failures += [f"{one['kernel']} {one['shape']}: {one['why']}" for one in missing]
    if stage.rehearse:
        stage.failures += [
            f"{row['kernel']} {row['shape']}, {name}: {peer['missing']}"
            for row in figures["rows"]
            for name, peer in row["peers"].items()
            if "missing" in peer and name != ONLY_ON_GPU
        ]
    for cut in figures["cut"]:
        stage.show(f"not measured: {cut['kernel']} {cut['shape']}: {cut['why']}")


def subjects(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    """All there is to measure, the copy first."""
    return chain.from_iterable(part.subjects(sizes, device) for part in (operations, tree_search, walks, attention))


def measure(
    sizes: Sizes, device: torch.device, deadline: float, show: Callable[[str], object]
) -> dict[str, list[dict[str, Any]]]:
    """Rows of figures, and what is not among them.

    Args:
        deadline: nothing is begun after it, of `time.monotonic`.
        show: is told of each row when it is done.

    Returns:
        `rows`; `failed` and `cut`, each a list of kernel, shape and why.
    """
    race = Race(clock_of(device), sizes.rounds, sizes.iterations, deadline)
    figures: dict[str, list[dict[str, Any]]] = {"rows": [], "failed": [], "cut": []}
    copied = 0.0
    for subject in subjects(sizes, device):
        missing = {"kernel": subject.kernel, "shape": subject.shape}
        if time.monotonic() > race.deadline:
            figures["cut"].append(missing | {"why": "the time was over"})
            continue
        try:
            row = race.measure(subject)
        except torch.OutOfMemoryError as caught:
            figures["cut"].append(missing | {"why": reason(caught)})
        except Exception as caught:  # The others are to be measured all the same.
            figures["failed"].append(missing | {"why": reason(caught)})
        else:
            if subject.kernel == "copy":
                # The last is the largest; of smaller ones, what is written partly stays in the cache.
                copied = row["gb_per_s"]
            row["copy_share"] = rounded(row["gb_per_s"] / copied) if copied else None
            figures["rows"].append(row)
            show(line_of(row))
    return figures


def line_of(row: dict[str, Any]) -> str:
    return f"{row['kernel']:16} {_words(row['shape']):42} {row['us']:>10} us"


def table_of(rows: list[dict[str, Any]]) -> Table:
    """One line per kernel: the shape that takes longest, and the peer that is fastest beside ours at any shape."""
    table = Table("kernel", "shapes", "longest", "us", "of copy", "worst error", "fastest peer, its time over ours")
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == kernel]
        longest = max(own, key=lambda row: row["us"])
        share = "" if longest["copy_share"] is None else f"{longest['copy_share']:.0%}"
        peers = [
            (peer["ratio"], f"{peer['ratio']:.2f}: {name} at {_words(row['shape'])}")
            for row in own
            for name, peer in row["peers"].items()
            if "ratio" in peer and name != "gather"
        ]
        figures = (f"{longest['us']:.1f}", share, f"{max(row['error'] for row in own):.1g}")
        table.add_row(kernel, str(len(own)), _words(longest["shape"]), *figures, min(peers)[1] if peers else "")
    return table


def _words(shape: dict[str, int | str]) -> str:
    return " ".join(f"{name}={value}" for name, value in shape.items())
