"""Time of an installation with a C compiler, which compiles the native kernels, and without one.

    python -m benchmarks.installation

A clone of the repository is installed into an empty folder, the two ways in turn. Dependencies and build tools are
those of this environment: no time goes to them.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks.report import write

ROOT = Path(__file__).parents[1]
COMPILERS = {"with": None, "without": "false"}  # the command `false` fails, as no compiler does


def install_seconds(compiler: str | None) -> float:
    """Return how long an installation takes.

    Raises:
        SystemExit: there is no compiler, or `CC` is ignored.
    """
    changed = {} if compiler is None else {"CC": compiler}
    with TemporaryDirectory() as folder:
        clone, target = Path(folder, "clone"), Path(folder, "installed")
        subprocess.run(["git", "clone", "--quiet", "--local", ROOT, clone], check=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        start = time.perf_counter()
        subprocess.run([*command, "--target", target, clone], check=True, env={**os.environ, **changed})
        seconds = time.perf_counter() - start
        compiled = any(target.rglob("_library*.so"))
        if compiled != (compiler is None):
            raise SystemExit(
                "kernels compiled by another compiler" if compiled else "no C compiler: install gcc or clang"
            )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMPILERS}
    for _ in range(args.rounds):
        for name, compiler in COMPILERS.items():
            seconds[name].append(install_seconds(compiler))
    pairs = zip(seconds["with"], seconds["without"], strict=True)
    figures = {f"seconds_{name}_compiler": round(statistics.median(taken), 1) for name, taken in seconds.items()}
    figures["seconds_longer"] = round(statistics.median(compiled - not_compiled for compiled, not_compiled in pairs), 1)
    table = Table(*figures)
    table.add_row(*(str(figure) for figure in figures.values()))
    Console().print(table)
    write("installation", {"rounds": args.rounds, "processors": os.cpu_count(), **figures})


if __name__ == "__main__":
    main()
