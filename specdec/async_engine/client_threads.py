"""Pools of threads in which clients have turns, and those that tokenize texts."""

import asyncio
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
# Characters up to which a text is short: some milliseconds.
SHORT_TEXT = 20_000
# Characters from which on a text is long: a second for a million of them, and a hundred bytes for each.
LONG_TEXT = 1 << 18
_THREADS = 2


class ClientThreads:
    """A pool of threads that serves clients by turns: one item of work of each, in order of arrival.

    Args:
        count: number of threads.
        name: prefix of their names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)
        self._lock = threading.Lock()
        # By client; the first one is served next.
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Queue work and return the future of its result. Cancelling the future drops work that has not begun."""
        future = Future[T]()
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, work))
        self._threads.submit(self._run)
        return future

    def _run(self) -> None:
        with self._lock:
            client = next(iter(self._waiting))
            own = self._waiting.pop(client)
            future, work = own.popleft()
            if own:
                self._waiting[client] = own
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
            # It holds the error, whose traceback holds this frame: a cycle, if the frame held the future.
            del future

    def close(self) -> None:
        """Cancel the work that has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class TextLanes:
    """Three lanes of threads that tokenize texts, apart by their length, so that short texts wait for no long ones.

    Clients have turns in each. Long texts are tokenized one at a time, which bounds the memory that they take.
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
