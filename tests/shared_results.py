"""Results that all test processes of a run share, so that only one of them computes each."""

import os
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from filelock import FileLock

T = TypeVar("T")


def shared(factory: pytest.TempPathFactory, name: str, compute: Callable[[], T]) -> T:
    """Return the result of `compute`: run by the first process that asks, read from a file by the others.

    Args:
        factory: tells the folder of this test run.
        name: of the result, unique in the run.
        compute: returns tensors and plain Python values.
    """
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # The base folder of a worker lies in that of the run.
        folder = folder.parent
    file = folder / f"{name}.pt"
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            torch.save(compute(), file)
        found: T = torch.load(file)
    return found
