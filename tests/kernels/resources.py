"""What the compiler gives each kernel at the shapes of Llama-3.1-8B, beside the least time its bytes take.

    TRITON_INTERPRET=1 python -m tests.kernels.resources

needs no GPU. It writes `benchmarks/results/kernel_resources.json`, from which the table in docs/gpu.md is made. A
kernel that has few bytes on their way from memory at once shows there before it runs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from rich.table import Table
from triton.runtime.interpreter import InterpretedFunction

from benchmarks.gpu import attention, operations, tree_search, walks
from benchmarks.gpu.sizes import LLAMA_8B, MIB
from benchmarks.report import write
from tests.kernels.aot import Compiled, compile_all
from tests.triton_launches import Launch, launch_of

ARCH = 90
# Of an H100: multiprocessors, and what each has; bytes a second of a plain read, as measured on one.
PROCESSORS, REGISTERS, SHARED, WARPS, BLOCKS = 132, 65536, 233472, 64, 32
BANDWIDTH = 3.05e12
# Registers of a warp are given in these steps, and each block takes so much shared memory of the system's.
REGISTER_STEP, SYSTEM_SHARED = 256, 1024
# One request, with a tree of 60 nodes and without, 1,024 tokens of context.
SIZES = replace(
    LLAMA_8B,
    batches=(1,),
    contexts=(1024,),
    chunk_batches=(1,),
    rows=(1, 61),
    sampled_rows=(61,),
    drafted_rows=(10,),
    moves=(1,),
    walks=(1,),
    copies=(MIB,),
    flex_batches=(),
)


class Call(NamedTuple):
    """A launch of a subject of the stage `kernels`, and its programs."""

    subject: str
    shape: dict[str, int | str]
    num_bytes: int
    launch: Launch
    programs: int


def calls() -> Iterator[Call]:
    """Yield the launches of all subjects that launch kernels of ours."""
    device = torch.device("cpu")
    for part in (operations, tree_search, walks, attention):
        for subject in part.subjects(SIZES, device):
            case, found = subject.build(), list[tuple[Launch, int]]()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(InterpretedFunction, "run", _recording(found))
                case.run()
            for launch, programs in found:
                yield Call(subject.kernel, subject.shape, case.num_bytes, launch, programs)


def _recording(found: list[tuple[Launch, int]]) -> Callable[..., None]:
    """Return what keeps launches, with the number of their programs, instead of running them."""

    def record(kernel: Any, *args: Any, grid: Sequence[int], **kwargs: Any) -> None:
        kwargs.pop("warmup")
        found.append((launch_of(kernel, args, kwargs), prod(grid)))

    return record


def resident(found: Compiled, warps: int) -> int:
    """Return the programs that a multiprocessor holds at once."""
    registers = warps * -(-found.registers * 32 // REGISTER_STEP) * REGISTER_STEP
    return min(REGISTERS // registers, SHARED // (found.shared + SYSTEM_SHARED), WARPS // warps, BLOCKS)


def rows_of(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return a row of figures for each launch."""
    rows: list[dict[str, Any]] = []
    for call, (launch, found) in zip(calls, compile_all([call.launch for call in calls], ARCH, 2), strict=True):
        assert not found.error, found.error
        warps = launch.options["num_warps"]
        at_once = resident(found, warps)
        running = min(call.programs, at_once * PROCESSORS)
        # What joins parts reads little; the bytes are those of the launch before it.
        is_first = not rows or (rows[-1]["of"], rows[-1]["shape"]) != (call.subject, call.shape)
        own: dict[str, Any] = {}
        if is_first:
            own = {
                "bytes": call.num_bytes,
                "bytes_in_flight": round(call.num_bytes / call.programs * running / PROCESSORS),
                "us_at_least": round(1e6 * call.num_bytes / BANDWIDTH, 2),
            }
        rows.append(
            {
                "kernel": launch.kernel.partition(":")[2].removesuffix("_kernel"),
                "of": call.subject,
                "shape": call.shape,
                "programs": call.programs,
                "warps": warps,
                "registers": found.registers,
                "shared": found.shared,
                "spills": found.spills,
                "programs_at_once": at_once,
                "occupancy": round(at_once * warps / WARPS, 2),
                **own,
            }
        )
    return rows


def main() -> None:
    rows = rows_of(list(calls()))
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=240).print(table)
    write("kernel_resources", {"arch": ARCH, "bandwidth": BANDWIDTH, "rows": rows})


if __name__ == "__main__":
    main()
