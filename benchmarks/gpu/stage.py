"""Run one stage of the first day on a GPU in this process, and write its results as JSON.

python -m benchmarks.gpu.stage STAGE SECONDS        # as `benchmarks.gpu.day` starts it
"""

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.day import run_process
from benchmarks.gpu.device import day_device

# Columns of a table where the output is a file.
WIDTH = 140


@dataclass
class Stage:
    """Inputs and results of a stage.

    Attributes:
        out: folder of results.
        deadline: of `time.monotonic`; it is stopped soon after.
        figures: entries of its JSON.
        failures: lines that say why it has not passed.
        table: is printed last.
    """

    name: str
    device: torch.device
    out: Path
    deadline: float
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    table: Table | None = None

    @property
    def rehearse(self) -> bool:
        """Return whether this is a rehearsal, which runs on a CPU."""
        return self.device.type == "cpu"

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def show(self, line: str) -> None:
        print(line, flush=True)

    def run_program(
        self, command: list[str], until: float | None = None, tool: tuple[str, ...] = (), **environment: str
    ) -> tuple[int | None, list[str]]:
        """Run a program, print its output, and return its exit status, None if it was stopped, and its lines.

        Args:
            command: what follows "python".
            until: time of `time.monotonic` to stop it at; by default the stage's deadline.
            tool: command before "python", of a tool that only a GPU needs. A rehearsal prints it and does without.
            environment: further variables.
        """
        words = [sys.executable, *command]
        if tool and self.rehearse:
            self.show(f"rehearsal, without: {' '.join(tool)}")
        elif tool:
            words = [*tool, *words]
        self.show(f"$ {' '.join(words)}")
        lines: list[str] = []
        seconds = (self.deadline if until is None else until) - time.monotonic()
        status = run_process(words, environment, max(0, seconds), lambda line: lines.append(line.rstrip()))
        return status, lines

    def write(self, status: str) -> None:
        """Write the JSON of what is known so far."""
        document = {
            "stage": self.name,
            "rehearsal": self.rehearse,
            "status": status,
            "failures": self.failures,
            **circumstances(),
            **self.figures,
        }
        (self.out / f"{self.name}.json").write_text(json.dumps(document, indent=2) + "\n")


def circumstances() -> dict[str, Any]:
    """Return hardware, versions and commit.

    A tree without git, such as a copy of one, has the commit that the variable COMMIT names.
    """
    from specdec.bench.environment import environment

    found = environment("triton", "numpy")
    commit, is_changed = found.pop("commit"), found.pop("uncommitted_changes")
    if commit is None:
        commit, is_changed = os.environ.get("COMMIT"), True
    if commit is not None and is_changed:
        commit = f"tree of {commit}"
    device: dict[str, Any] = {}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device = {
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return {**found, **device, "commit": commit}


def main() -> None:
    name, seconds = sys.argv[1:]
    deadline = time.monotonic() + float(seconds)
    stage = Stage(name, day_device(), Path(os.environ["OUT"]), deadline)
    stage.write("unfinished")
    try:
        # Imported late: Triton asks at the import of kernels whether it is to interpret them.
        import_module(f"benchmarks.gpu.{name.replace('-', '_')}").run(stage)
    except Exception as caught:  # Whatever it is, what was found before is to be kept.
        traceback.print_exc()
        stage.failures.append(f"{type(caught).__name__}: {caught}")
    stage.write("failed" if stage.failures else "passed")
    if stage.table is not None:
        Console(width=None if sys.stdout.isatty() else WIDTH).print(stage.table)
    for failure in stage.failures:
        stage.show(f"failed: {failure}")
    sys.exit(bool(stage.failures))


if __name__ == "__main__":
    main()
