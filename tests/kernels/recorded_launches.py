"""Launches that the engine's tests have recorded, as Triton compiles them; and their compilation for GPUs.

    python -m tests.kernels.recorded_launches compile 80 90

compiles all of them, and those of the models that we name, for compute capabilities 8.0 and 9.0. A test of
`tests/specdec` that launches a kernel in a way that is not recorded fails. To record all of them again:

    rm tests/kernels/recorded_launches.jsonl
    SPECDEC_RECORD_LAUNCHES=1 python -m pytest tests/specdec
"""

import fcntl
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.triton_launches import Launch

FILE = Path(__file__).with_suffix(".jsonl")
RECORD = "SPECDEC_RECORD_LAUNCHES"
# Launches in the table of the worst.
WORST = 8


def recorded(file: Path = FILE) -> list[Launch]:
    """Return the launches of a file, one a line."""
    return list(map(Launch.of_line, file.read_text(encoding="utf-8").splitlines())) if file.exists() else []


def check_recorded(found: Mapping[str, Launch], file: Path = FILE) -> None:
    """Fail if a launch, given by its line, is not in the file; or add it, if the environment says so."""
    if not found:
        return
    if os.environ.get(RECORD):
        _add(found, file)
        return
    new = sorted(found.keys() - {launch.line for launch in recorded(file)})
    assert not new, (
        f"{len(new)} launches were never compiled for GPUs. Record them ({RECORD}=1 python -m pytest "
        f"tests/specdec), and compile them (python -m tests.kernels.recorded_launches compile 80 90):\n"
        + "\n".join(new)
    )


def launches_on(arch: int, launches: Sequence[Launch]) -> list[Launch]:
    """Return launches with the loop settings of attention that GPUs of an architecture have."""
    from specdec.kernels.triton.attention_plan import AttentionGeometry, Chip, configs_of

    def on_arch(launch: Launch) -> Launch:
        if not launch.kernel.endswith(":tree_attention_kernel"):
            return launch
        sizes, number_bytes = launch.constants, 4 if launch.types["p_query"].startswith("*fp32") else 2
        crowded = sizes["WINDOWED"] or sizes["SLOPED"] or sizes["CODES"] > 0
        geometry = AttentionGeometry(number_bytes, sizes["BLOCK_D"], sizes["GROUP"], kv_heads=1)
        config = configs_of(geometry, Chip(132, arch == 90), crowded=crowded)[sizes["BLOCK_M"]]
        arguments, options = {**launch.arguments, "BLOCK_N": config.keys}, {**launch.options, "num_warps": config.warps}
        return replace(launch, arguments=arguments, options=options)

    return list(map(on_arch, launches))


def _add(found: Mapping[str, Launch], file: Path) -> None:
    """Add launches to the file, in order, whichever processes do so at once."""
    with file.open("a+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        lines = sorted({*stream.read().splitlines(), *found})
        stream.truncate(0)
        stream.write("".join(f"{line}\n" for line in lines))


def compile_for(arch: int, processes: int) -> int:
    """Compile all launches for an architecture, say how they fare, and return how many are at fault."""
    from tests.kernels.aot import compile_all, table
    from tests.kernels.model_launches import model_launches

    given = {launch.line: launch for launch in [*launches_on(arch, recorded()), *model_launches(arch)]}
    done, faults = [], 0
    for launch, found in compile_all(list(given.values()), arch, processes):
        done.append((launch, found))
        if fault := found.fault(arch):
            faults += 1
            print(f"sm_{arch}: {fault}\n  {launch.line}", flush=True)
        if len(done) % 20 == 0 or len(done) == len(given):
            print(f"sm_{arch}: {len(done)} of {len(given)} launches compiled", flush=True)
    done.sort(key=lambda pair: (pair[1].spills, pair[1].registers, pair[1].shared), reverse=True)
    print(table(done[:WORST], arch), flush=True)
    return faults


def main() -> None:
    command, *archs = sys.argv[1:]
    assert command == "compile", __doc__
    # Before a kernel is imported: launches are made in the interpreter, and compiled in other processes.
    os.environ["TRITON_INTERPRET"] = "1"
    faults = sum(compile_for(int(arch), processes=len(os.sched_getaffinity(0))) for arch in archs)
    sys.exit(f"{faults} launches do not compile, spill, or do not fit a block" if faults else 0)


if __name__ == "__main__":
    main()
