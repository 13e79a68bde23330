"""Ahead-of-time compilation of Triton kernels for GPUs that this machine lacks, with the resource use of each.

    python -m tests.kernels.aot tests.kernels.test_aot_tree_attention:specialisations 90

A test calls `compile_all` with the name of a function that returns the specialisations. They are compiled in a new
process without `TRITON_INTERPRET`, because with it `@triton.jit` makes functions that only the interpreter can run.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Bytes of shared memory that one block may have, by compute capability: A100, H100 and H200.
SHARED_LIMIT = {80: 166912, 90: 232448}


@dataclass(frozen=True)
class Specialisation:
    """A kernel and everything that its machine code depends on.

    Attributes:
        name: its name in the table.
        kernel: a `@triton.jit` function.
        signature: type of each run-time argument, such as `*bf16`, `i32`, `fp32`; with `:16` behind it where
            the pointer or number is divisible by 16, which a launch finds out by itself.
        constexprs: value of each constexpr argument. A run-time argument that is 1 or None at a launch belongs
            here as well: Triton compiles it in.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Compiled:
    """Resources of a compiled kernel.

    Attributes:
        registers: per thread.
        shared: bytes a block.
        spills: bytes of local memory per thread.
        cubin_size: bytes.
    """

    registers: int
    shared: int
    spills: int
    cubin_size: int


def compile_for(spec: Specialisation, arch: int) -> Compiled:
    """Compile for compute capability `arch` (80, 90). Call it where `TRITON_INTERPRET` is not set.

    With multiply-adds fused, as in every launch (from Triton 3.10 on, those have to ask for it). Triton keeps what
    it has compiled, so that a second run takes no time.

    Raises:
        ValueError: the arguments given are not the kernel's.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(spec.kernel.arg_names)
    given = {**spec.signature, **spec.constexprs}
    if sorted(given) != sorted(names):
        raise ValueError(f"{spec.name}: arguments differ from the kernel's: {sorted(set(given) ^ set(names))}")
    types = {name: spec.signature.get(name, "constexpr").removesuffix(":16") for name in names}
    aligned = [name for name, kind in spec.signature.items() if kind.endswith(":16")]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(spec.kernel, types, dict(spec.constexprs), attrs)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return Compiled(usage["REG"], kernel.metadata.shared, usage["STACK"] + usage["LOCAL"], len(cubin))


def compile_all(specialisations: str, arch: int) -> dict[str, Compiled]:
    """Compile the specialisations that `module:function` returns, in a new process. Return the results by name."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot", specialisations, str(arch)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return {name: Compiled(**found) for name, found in json.loads(run.stdout.splitlines()[-1]).items()}


def table(compiled: Mapping[str, Compiled], arch: int) -> str:
    """Return a table for people, one line for each kernel."""
    width = max(len(name) for name in compiled)
    lines = [f"sm_{arch:<{width - 3}} registers  shared  spills   cubin"]
    for name, found in compiled.items():
        lines.append(f"{name:<{width}} {found.registers:>9} {found.shared:>7} {found.spills:>7} {found.cubin_size:>7}")
    return "\n".join(lines)


def main() -> None:
    where, arch = sys.argv[1], int(sys.argv[2])
    module, function = where.split(":")
    specs: list[Specialisation] = getattr(importlib.import_module(module), function)()
    compiled = {spec.name: compile_for(spec, arch) for spec in specs}
    assert len(compiled) == len(specs), "names of specialisations are not distinct"
    print(table(compiled, arch))
    print(json.dumps({name: asdict(found) for name, found in compiled.items()}))


if __name__ == "__main__":
    main()
