"""Threads for work of many clients, which have turns."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class ClientThreads:
    """Threads that take one client's work after another's, each client's in order.

    Args:
        count: threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)
        self._lock = threading.Lock()
        # The client that comes next is first.
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Have work done. Cancelling its future drops it if it has not begun."""
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

    def close(self) -> None:
        """Drop what has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)
