"""Tests of the native kernels' pool of threads."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "kernels" / "native"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_thread_that_goes_to_sleep_is_woken(tmp_path: Path) -> None:
    """A caller that is late to wake a thread does not make it sleep for good, which also made closing hang."""
    program = tmp_path / "sleeping_pool"
    compiler = ["gcc", "-O2", "-std=gnu11", "-pthread", f"-I{SOURCES}", str(HERE / "sleeping_pool.c")]
    subprocess.run([*compiler, "-o", str(program)], check=True)
    subprocess.run([program], check=True, timeout=60)
