"""A pool of threads in which clients have turns."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


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
