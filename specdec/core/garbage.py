"""Pauses of Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Pause the collector while a process loads modules and a model, and exempt all that there is then from it.

    It would scan a million objects that stay: 0.3 s while they are loaded, and 0.1 s in the middle of a step now and
    then. Without them a full collection takes a few milliseconds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        exempt()
    finally:
        if was_enabled:
            gc.enable()


def exempt() -> None:
    """Exempt all objects that there are from collections, once a process has started; see `loading`."""
    gc.freeze()
