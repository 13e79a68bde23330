"""One tiny run of `benchmarks.gpu` for all tests that read its output."""

import io
import json
import sys
from contextlib import redirect_stdout

import pytest

from benchmarks import gpu
from tests.benchmarks.tiny_run import TinyRun


@pytest.fixture(scope="session")
def tiny_run() -> TinyRun:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", ["benchmarks.gpu", "--tiny"])
        # A machine may be slow.
        patch.setattr(gpu, "KERNEL_SECONDS", 10**9)
        patch.setattr(gpu, "SECONDS", 10**10)
        gpu.main()
    lines = printed.getvalue().splitlines()
    return TinyRun(lines, json.loads(lines[-1]))
