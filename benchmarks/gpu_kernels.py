"""Every Triton kernel at the shapes of Llama-3.1-8B, against the machine's own copy and against torch.

A part of `benchmarks.gpu`. Each call is held against its twin in plain torch and timed in turns with
its peers, as a CUDA graph behind a flush of the second-level cache; medians of rounds. Bytes are the fewest that a call
must read and write; what share of the copy's bandwidth that makes says how far it is from the bound. The time of
`one_number` is in every other. Attention of torch needs its keys gathered first: "gather" is the time of that, which
is in none of the others. What there was no time or memory for is listed.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

# The modules of kernels are imported late: Triton asks at their import whether it is to interpret them.

ROOT = Path(__file__).parents[1]
# Workers of the tests, which mostly compile, where pytest-xdist is installed.
TEST_WORKERS = 8


def run(tiny: bool, device: torch.device, seconds: float, show: Callable[[str], object]) -> dict[str, Any]:
    """Rows of figures, and what is not among them.

    Args:
        tiny: small sizes instead of an 8B model's.
        device: a CPU only if `TRITON_INTERPRET` was set before any kernel was imported.
        seconds: nothing is begun after them.
        show: is told of each row when it is done.

    Returns:
        `rows`; `failed` and `cut`, each a list of kernel, shape and why.
    """
    from benchmarks import gpu_attention, gpu_operations, gpu_walks
    from benchmarks.gpu_clock import clock_of
    from benchmarks.gpu_race import Race, Subject, reason, rounded
    from benchmarks.gpu_sizes import LLAMA_8B, TINY

    sizes = TINY if tiny else LLAMA_8B
    race = Race(clock_of(device), sizes.rounds, sizes.iterations, time.monotonic() + seconds)
    parts = (gpu_operations, gpu_walks, gpu_attention)
    subjects: Iterator[Subject] = chain.from_iterable(part.subjects(sizes, device) for part in parts)
    figures: dict[str, list[dict[str, Any]]] = {"rows": [], "failed": [], "cut": []}
    copied = 0.0
    for subject in subjects:
        missing = {"kernel": subject.kernel, "shape": subject.shape}
        if time.monotonic() > race.deadline:
            figures["cut"].append(missing | {"why": f"{seconds:.0f} s were over"})
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


def run_tests(seconds: float) -> dict[str, Any]:
    """The kernels' tests in a process of their own: whether they `passed`, None if they were stopped, and their end."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(TEST_WORKERS)]
    start = time.monotonic()
    # A session of its own, so that its workers can be stopped with it.
    tests = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = tests.communicate(timeout=seconds)
    except BaseException as caught:
        os.killpg(tests.pid, signal.SIGKILL)
        if not isinstance(caught, subprocess.TimeoutExpired):
            raise
        output = tests.communicate()[0]
    return {
        "passed": tests.returncode == 0 if tests.returncode >= 0 else None,
        "seconds": round(time.monotonic() - start, 1),
        "end": output.splitlines()[-20:],
    }


def line_of(row: dict[str, Any]) -> str:
    shape = " ".join(f"{name}={value}" for name, value in row["shape"].items())
    return f"{row['kernel']:16} {shape:42} {row['us']:>10} us"


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table("kernel", "shape", "us", "GB/s", "of copy", "TFLOP/s", "error", "peers' time over ours")
    for row in rows:
        peers = [
            f"{name} {peer['us']:.0f} us" if name == "gather" else f"{name} {peer['ratio']:.2f}"
            for name, peer in row["peers"].items()
            if "us" in peer
        ]
        peers += [f"no {name}" for name, peer in row["peers"].items() if "us" not in peer]
        share = "" if row["copy_share"] is None else f"{row['copy_share']:.0%}"
        flops = f"{row['tflop_per_s']:.0f}" if "tflop_per_s" in row else ""
        shape = ", ".join(str(value) for value in row["shape"].values())
        figures = (f"{row['us']:.1f}", f"{row['gb_per_s']:.0f}", share, flops, f"{row['error']:.1g}")
        table.add_row(row["kernel"], shape, *figures, ", ".join(peers))
    return table
