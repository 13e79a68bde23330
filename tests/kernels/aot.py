"""Ahead-of-time compilation of Triton kernels for GPUs that this machine lacks, with the resource use of each.

    python -m tests.kernels.aot 90 < LAUNCHES

compiles launches, one a line, for compute capability 9.0. `compile_all` does so in new processes without
`TRITON_INTERPRET`, because with it `@triton.jit` makes functions that only the interpreter can run.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.triton_launches import ALIGNED, Launch

ROOT = Path(__file__).parents[2]
# Bytes of shared memory that one block may have, by compute capability: A100, H100 and H200.
SHARED_LIMIT = {80: 166912, 90: 232448}
# Bytes that a thread may spill: a few numbers, which some versions of the compiler keep in registers.
SPILLS_LIMIT = 16


@dataclass(frozen=True)
class Compiled:
    """Resources of a compiled kernel.

    Attributes:
        registers: per thread.
        shared: bytes a block.
        spills: bytes of local memory per thread.
        cubin_size: bytes.
        error: why it does not compile; empty if it does.
    """

    registers: int = 0
    shared: int = 0
    spills: int = 0
    cubin_size: int = 0
    error: str = ""

    def fault(self, arch: int) -> str:
        """Return what is wrong with it on GPUs of a compute capability, or nothing."""
        if self.error:
            return self.error
        if self.shared > SHARED_LIMIT[arch]:
            return f"takes {self.shared} bytes of shared memory; a block has {SHARED_LIMIT[arch]}"
        return f"spills {self.spills} bytes" if self.spills > SPILLS_LIMIT else ""


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile for compute capability `arch` (80, 90). Call it where `TRITON_INTERPRET` is not set.

    With multiply-adds fused, as in every launch (from Triton 3.10 on, those have to ask for it). Triton keeps what
    it has compiled, so that a second run takes no time.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, kinds = launch.function(), launch.types
    types = {name: kinds.get(name, "constexpr").removesuffix(ALIGNED) for name in kernel.arg_names}
    aligned = [kernel.arg_names.index(name) for name, kind in kinds.items() if kind.endswith(ALIGNED)]
    attrs = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(kernel, types, launch.constants, attrs)
    try:
        target = GPUTarget("cuda", arch, 32)
        compiled = triton.compile(source, target=target, options={"enable_fp_fusion": True, **launch.options})
    except Exception as error:
        return Compiled(error=f"{type(error).__name__}: {error}")
    cubin = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return Compiled(usage["REG"], compiled.metadata.shared, usage["STACK"] + usage["LOCAL"], len(cubin))


def compile_all(launches: Sequence[Launch], arch: int, processes: int = 1) -> Iterator[tuple[Launch, Compiled]]:
    """Compile launches in new processes, each of which takes the next; yield them in the order given."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot", str(arch)]
    workers = [
        subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def compiled(launch: Launch) -> Compiled:
        worker = idle.get()
        assert worker.stdin is not None
        assert worker.stdout is not None
        said = ""
        # The compiler may have ended it before.
        with suppress(BrokenPipeError):
            print(launch.line, file=worker.stdin, flush=True)
            said = worker.stdout.readline()
        idle.put(worker)
        return Compiled(**json.loads(said)) if said else Compiled(error="the process that compiled it has ended")

    try:
        with ThreadPoolExecutor(processes) as threads:
            yield from zip(launches, threads.map(compiled, launches), strict=True)
    finally:
        for worker in workers:
            worker.communicate()


def table(compiled: Sequence[tuple[Launch, Compiled]], arch: int) -> str:
    """Return a table for people, one line for each launch."""
    width = max(len(launch.label) for launch, _ in compiled)
    lines = [f"sm_{arch:<{width - 3}} registers  shared  spills   cubin"]
    for launch, found in compiled:
        numbers = f"{found.registers:>9} {found.shared:>7} {found.spills:>7} {found.cubin_size:>7}"
        lines.append(f"{launch.label:<{width}} {numbers}")
    return "\n".join(lines)


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asdict(compile_launch(Launch.of_line(line), int(sys.argv[1])))), flush=True)


if __name__ == "__main__":
    main()
