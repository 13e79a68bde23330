"""What git tracks: small enough to travel to a borrowed machine."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Bytes. A borrowed machine takes a working tree of at most 64 MiB (67.1 million bytes).
MOST_BYTES = 56_000_000


def tracked_files() -> list[Path]:
    """Return the files of the working tree that git tracks."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"not a git checkout: {found.stderr.strip()}")
    # A file that was deleted and not yet committed is still listed.
    return [ROOT / name for name in found.stdout.split("\0") if name and os.path.lexists(ROOT / name)]


def test_tracked_files_fit_a_borrowed_machine() -> None:
    sizes = {path: path.lstat().st_size for path in tracked_files()}
    largest = [f"{path.relative_to(ROOT)}: {sizes[path]:,}" for path in sorted(sizes, key=sizes.__getitem__)[-5:]]
    assert sum(sizes.values()) <= MOST_BYTES, f"the largest files: {', '.join(largest)}"
