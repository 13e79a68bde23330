"""The kernel tests on a machine with a GPU and little else: no native library, and few packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# A plugin of pytest: it hides the packages that such a machine lacks, and the library before a test file is imported.
PLUGIN = """
import sys

sys.modules.update(dict.fromkeys(["fastapi", "jsonschema", "openai", "schemathesis", "llguidance"]))


def pytest_collection():
    from specdec.kernels.native import library as native_library

    native_library.library_file = lambda: None
"""


def run_pytest(folder: Path, *arguments: str) -> str:
    """Return what pytest prints there, after it has succeeded."""
    (folder / "bare_machine.py").write_text(PLUGIN)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    # schemathesis is itself a plugin.
    plugins = ["-p", "bare_machine", "-p", "no:schemathesis", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-n", "0", "-q", "-m", "not nightly"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


@pytest.mark.long
def test_all_files_are_collected(tmp_path: Path) -> None:
    assert " tests collected" in run_pytest(tmp_path, "--collect-only", "tests/kernels").splitlines()[-1]


@pytest.mark.long
def test_tests_of_the_library_are_skipped_with_the_reason(tmp_path: Path) -> None:
    """Asked for while a file is imported, while hypothesis draws arguments, and in a test."""
    files = [f"tests/kernels/test_{name}.py" for name in ("native_walks", "native_adapters", "quantized_products")]
    printed = run_pytest(tmp_path, "-rs", *files)
    assert "SKIPPED [30] tests/kernels/native_forms.py:" in printed
    assert "the native kernels are not built: install a C compiler" in printed
    assert printed.splitlines()[-1].startswith("5 passed, 30 skipped")
