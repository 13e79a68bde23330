"""Threads that tokenize texts, apart by their length, so that short texts do not wait for long ones."""

import asyncio
import ctypes
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from specdec.async_engine.client_threads import ClientThreads

P = ParamSpec("P")
T = TypeVar("T")
# Characters up to which a text is short: some milliseconds.
SHORT_TEXT = 20_000
# Characters from which on a text is long: a second for a million of them, and a hundred bytes for each.
LONG_TEXT = 1 << 18
_THREADS = 2


class TextLanes:
    """Three lanes of threads, in each of which clients have turns.

    Long texts are tokenized one at a time, which bounds the memory that they take.
    """

    def __init__(self) -> None:
        self._short, self._middle = ClientThreads(_THREADS, "short texts"), ClientThreads(_THREADS, "texts")
        self._long = ClientThreads(1, "long texts")

    async def run(self, client: str, size: int, work: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Return the result of work in a thread of its lane. Cancelling drops work that has not begun.

        Args:
            client: name of the client whose texts they are.
            size: characters of all texts that are tokenized.
        """

        def call() -> T:
            try:
                return work(*args, **keywords)
            finally:
                if size > LONG_TEXT:
                    _return_memory()

        lane = self._short if size <= SHORT_TEXT else self._middle if size <= LONG_TEXT else self._long
        return await asyncio.wrap_future(lane.submit(client, call))


def _return_memory() -> None:
    """Give freed memory back to the system; glibc keeps it for later, in an arena for each thread."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
