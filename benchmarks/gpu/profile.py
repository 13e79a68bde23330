"""Profile the two slowest kernels of the stage `kernels` with Nsight Compute (ncu).

A stage of `benchmarks.gpu.day`. It reads kernels.json in the folder of results, or the file that the variable KERNELS
names, and leaves a report of each, KERNEL.ncu-rep, for Nsight Compute's window. The clocks stay as they are.
"""

import csv
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.gpu.stage import Stage

PROFILED = 2
PROFILER = ("ncu", "--profile-from-start", "off", "--set", "full", "--clock-control", "none", "--force-overwrite")
# References, which are not profiled.
COPIES = ("copy", "one_number")
SHOWN = {
    "duration": "GPU Speed Of Light Throughput: Duration",
    "of memory": "GPU Speed Of Light Throughput: Memory Throughput",
    "of arithmetic": "GPU Speed Of Light Throughput: Compute (SM) Throughput",
    "occupancy": "Occupancy: Achieved Occupancy",
    "registers": "Launch Statistics: Registers Per Thread",
}


def run(stage: Stage) -> None:
    file = Path(os.environ.get("KERNELS") or stage.out / "kernels.json")
    if not file.is_file():
        raise ValueError(f"{file} is not there; run the stage kernels first, or name its JSON by KERNELS=FILE")
    chosen = slowest(json.loads(file.read_text())["rows"])
    stage.table = Table("kernel", "shape", "launched", *SHOWN)
    found = stage.figures["kernels"] = []
    for row in chosen:
        kernel, shape = row["kernel"], row["shape"]
        report = stage.out / f"{kernel}.ncu-rep"
        tool = (*PROFILER, "--export", str(report))
        command = ["-m", "benchmarks.gpu.one_kernel", kernel, "--shape", json.dumps(shape)]
        status, lines = stage.run_program(command if stage.rehearse else [*command, "--large"], tool=tool)
        if status != 0:
            why = "stopped" if status is None else f"exit status {status}"
            stage.failures.append(f"{kernel}: {why}: {lines[-1] if lines else ''}")
            continue
        launches = [] if stage.rehearse else launches_of(details_of(report))
        found.append({"kernel": kernel, "shape": shape, "us": row["us"], "launches": launches})
        for launch in launches:
            metrics = launch["metrics"]
            stage.table.add_row(
                kernel, json.dumps(shape), launch["name"], *(metrics.get(key, "") for key in SHOWN.values())
            )


def slowest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the kernels that take longest, each at the shape at which it does."""
    by_kernel: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["us"]):
        if row["kernel"] not in COPIES:
            by_kernel.setdefault(row["kernel"], row)
    return list(by_kernel.values())[:PROFILED]


def details_of(report: Path) -> list[str]:
    """Return the lines of a report's details, as CSV."""
    command = ["ncu", "--import", str(report), "--page", "details", "--csv"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def launches_of(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the launches in ncu's CSV, each with its name and its metrics: "section: metric" to "value unit".

    Raises:
        ValueError: there is none.
    """
    # ncu may print messages before the table.
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, Any]] = {}
    for entry in csv.DictReader(lines[start:]):
        launch = launches.setdefault(entry["ID"], {"name": entry["Kernel Name"], "metrics": {}})
        # Other lines are advice.
        if entry["Metric Name"]:
            name = f"{entry['Section Name']}: {entry['Metric Name']}"
            launch["metrics"][name] = f"{entry['Metric Value']} {entry['Metric Unit']}".strip()
    if not launches:
        raise ValueError(f"ncu's report names no launch: {' '.join(lines[-3:])}")
    return list(launches.values())
