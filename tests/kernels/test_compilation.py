"""What Triton compiles, counted; once for real, for a GPU that this machine lacks, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from triton import knobs
from triton.knobs import CompileTimes

from specdec.kernels.triton.compilation import counted_compilation

PROGRAM = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec.kernels.triton.compilation import counted_compilation

@triton.jit
def kernel(p, N: tl.constexpr):
    tl.store(p + tl.arange(0, N), 0)

def compiled(size):
    triton.compile(ASTSource(kernel, {"p": "*i32", "N": "constexpr"}, {"N": size}), target=GPUTarget("cuda", 90, 32))

with counted_compilation() as first:
    compiled(16)
    compiled(32)
with counted_compilation() as second:
    compiled(16)
print(first, second, sep="|")
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_second_time_it_is_found_in_the_cache(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, program], env=given, capture_output=True, text=True, check=True)
    first, second = done.stdout.strip().split("|")
    assert first.startswith("2 kernels compiled in ")
    assert first.endswith(f" s, 0 found in {tmp_path / 'cache'}")
    assert second == f"0 kernels compiled in 0 s, 1 found in {tmp_path / 'cache'}"


def test_another_listener_is_told_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def other(*, cache_hit: bool, **_: Any) -> None:
        told.append(cache_hit)

    monkeypatch.setattr(knobs.compilation, "listener", other)
    times = CompileTimes(1_000_000, [("ttir", 500_000)], 500_000)
    with counted_compilation() as counted:
        for hit in (True, False, True):
            listener: Any = knobs.compilation.listener
            listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=hit)
    assert told == [True, False, True]
    assert knobs.compilation.listener is other
    assert (counted.num_compiled, counted.num_found, counted.seconds) == (1, 2, 2.0)
