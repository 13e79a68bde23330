"""The CPU library, the kernels' tests on the GPU, and what compute-sanitizer finds.

A stage of `benchmarks.gpu.day`. memcheck looks at a short run of the engine, racecheck at attention and the walks,
whose programs share memory. The library only matters to tests that compare with it, and is no failure where it cannot
be built. Without compute-sanitizer its two parts fail; where it does not support the device they are not run.
"""

import re
import shutil
import time

from rich.table import Table

from benchmarks.gpu.stage import Stage
from specdec.kernels.native.library import library_file

# Parts of the stage's time, in seconds of its longest; what one leaves is the next ones'.
SHARES = {"build": 80, "tests": 220, "memcheck": 130, "racecheck": 90}
TEST_WORKERS = 8
# Calls that torch and Triton make to see what a driver has are no errors.
SANITIZER = (
    "compute-sanitizer",
    "--report-api-errors",
    "no",
    "--error-exitcode",
    "99",
    "--print-limit",
    "20",
    "--tool",
)
RACED = ("tree_attention", "coupled_walk", "rejection_walk")
# Each tensor is an allocation of its own, so that reading behind it is seen.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# What the tool says on machines whose driver does not let it in; the program then fails for that alone.
UNSUPPORTED = "Device not supported"
WIDTH = 80
LAST_LINES = 20
SUMMARY = re.compile(r"ERROR SUMMARY|RACECHECK SUMMARY|\d+ (passed|failed|error)")


def run(stage: Stage) -> None:
    build, tests = (
        ["setup.py", "build_ext", "--inplace"],
        ["tests/kernels", "-m", "not nightly", "-n", str(TEST_WORKERS)],
    )
    if stage.rehearse:
        # What takes minutes is not done again: an installation has built the library, and CI runs all tests.
        build, tests = [*build, "--help"], ["tests/kernels/test_elementwise_kernels.py", "-n", "0"]
    parts: dict[str, tuple[list[str], tuple[str, ...], dict[str, str]]] = {
        "build": (build, (), {}),
        "tests": (["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], (), {}),
        "memcheck": (["-m", "benchmarks.gpu.short_engine"], (*SANITIZER, "memcheck"), UNCACHED),
        "racecheck": (["-m", "benchmarks.gpu.one_kernel", *RACED], (*SANITIZER, "racecheck"), {}),
    }
    stage.table = Table("part", "result", "seconds", "last words")
    figures = stage.figures["parts"] = {}
    until, scale = time.monotonic(), stage.seconds_left / sum(SHARES.values())
    for name, (command, tool, environment) in parts.items():
        until += SHARES[name] * scale
        start = time.monotonic()
        is_unsupported = False
        if tool and not stage.rehearse and shutil.which(tool[0]) is None:
            result, lines = "not run", [f"{tool[0]} is not installed; it comes with CUDA's toolkit"]
        else:
            status, lines = stage.run_program(command, until, tool, **environment)
            result = "stopped" if status is None else "passed" if status == 0 else f"exit status {status}"
            is_unsupported = bool(tool) and any(UNSUPPORTED in line for line in lines)
        if is_unsupported:
            result = "not run"
        if name == "build" and result == "passed":
            result = "built" if library_file() else "not built"
        if name != "build" and result != "passed" and not is_unsupported:
            stage.failures.append(f"{name}: {result}")
        seconds = round(time.monotonic() - start, 1)
        figures[name] = {"result": result, "seconds": seconds, "end": lines[-LAST_LINES:]}
        words = [line for line in lines if SUMMARY.search(line)] or lines or [""]
        stage.table.add_row(name, result, str(seconds), words[-1][:WIDTH])
