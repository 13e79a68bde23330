"""Processes that run a module of this package. Pure Python."""

import os
import subprocess
import sys
from typing import Any


def start_module(module: str, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a module in a process of its own session: Ctrl-C in a terminal does not reach it.

    It finds the modules that this process would, and does not run this one's main module again. It reads nothing, and
    writes on standard error, since standard output is the program's own.

    Args:
        options: further ones of `Popen`.
    """
    modules = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdout=2,
        env={**os.environ, "PYTHONPATH": modules},
        start_new_session=True,
        **{"stdin": subprocess.DEVNULL, **options},
    )
