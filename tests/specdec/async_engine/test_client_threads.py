"""Threads in which clients have turns."""

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from specdec.async_engine.client_threads import ClientThreads

PATIENCE = 60


@pytest.fixture
def busy() -> Iterator[tuple[ClientThreads, threading.Event]]:
    """One thread, and an event that its work waits for."""
    threads, event = ClientThreads(1, "test"), threading.Event()
    threads.submit("many", event.wait)
    yield threads, event
    event.set()
    threads.close()


def test_clients_have_turns(busy: tuple[ClientThreads, threading.Event]) -> None:
    (threads, event), order = busy, list[str]()
    names = [f"many {i}" for i in range(4)] + [f"few {i}" for i in range(2)] + ["one 0", "many 4"]
    futures = [threads.submit(name.split()[0], partial(order.append, name)) for name in names]
    event.set()
    for each in futures:
        each.result(PATIENCE)
    assert order == ["many 0", "few 0", "one 0", "many 1", "few 1", "many 2", "many 3", "many 4"]


def test_cancelled_and_failed_work_keeps_nobody_waiting(busy: tuple[ClientThreads, threading.Event]) -> None:
    (threads, event), order = busy, list[str]()
    cancelled = threads.submit("many", partial(order.append, "cancelled"))
    wrong = threads.submit("many", partial(int, "x"))
    last = threads.submit("few", partial(order.append, "last"))
    assert cancelled.cancel()
    event.set()
    last.result(PATIENCE)
    with pytest.raises(ValueError, match="invalid literal"):
        wrong.result(PATIENCE)
    assert order == ["last"]
