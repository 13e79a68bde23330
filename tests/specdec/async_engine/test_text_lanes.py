"""Lanes of threads: short texts pass long ones, and what nobody waits for is dropped."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from specdec.async_engine import client_threads
from specdec.async_engine.client_threads import LONG_TEXT, SHORT_TEXT, TextLanes

PATIENCE = 30


def run(work: Callable[[TextLanes, threading.Event], Coroutine[Any, Any, None]]) -> None:
    """Run a test with lanes, and an event that work in them waits for; it is set at the end."""

    async def with_lanes() -> None:
        lanes, event = TextLanes(), threading.Event()
        try:
            async with asyncio.timeout(PATIENCE):
                await work(lanes, event)
        finally:
            event.set()

    asyncio.run(with_lanes())


def test_short_texts_pass_long_ones() -> None:
    async def work(lanes: TextLanes, event: threading.Event) -> None:
        waiting = [asyncio.ensure_future(lanes.run("", size, event.wait)) for size in (LONG_TEXT, LONG_TEXT + 1) * 4]
        assert await lanes.run("", SHORT_TEXT, lambda: "short") == "short"
        assert not any(each.done() for each in waiting)
        event.set()
        assert await asyncio.gather(*waiting) == [True] * 8

    run(work)


def test_a_client_with_many_texts_keeps_no_other_one_waiting() -> None:
    async def work(lanes: TextLanes, event: threading.Event) -> None:
        order = list[str]()
        first = [asyncio.ensure_future(lanes.run("many", 1, event.wait)) for _ in range(2)]
        names = ["many"] * 9 + ["few"]
        rest = [asyncio.ensure_future(lanes.run(name, 1, order.append, name)) for name in names]
        await asyncio.sleep(0)
        event.set()
        await asyncio.gather(*first, *rest)
        assert "few" in order[:3]

    run(work)


def test_one_long_text_at_a_time() -> None:
    async def work(lanes: TextLanes, event: threading.Event) -> None:
        running: list[int] = []

        def long(number: int) -> None:
            running.append(number)
            event.wait()

        waiting = [asyncio.ensure_future(lanes.run("", LONG_TEXT + 1, long, number)) for number in range(3)]
        while not running:
            await asyncio.sleep(0.001)
        # It would be there as well.
        await lanes.run("", SHORT_TEXT, lambda: None)
        assert running == [0]
        for each in waiting[1:]:
            each.cancel()
        await asyncio.gather(*waiting[1:], return_exceptions=True)
        event.set()
        await waiting[0]
        await lanes.run("", LONG_TEXT + 1, running.append, 3)
        # Cancelled ones have never begun.
        assert running == [0, 3]

    run(work)


def test_memory_goes_back_after_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[None] = []
    monkeypatch.setattr(client_threads, "_return_memory", lambda: given_back.append(None))

    async def work(lanes: TextLanes, _: threading.Event) -> None:
        await lanes.run("", LONG_TEXT, int)
        assert not given_back
        with pytest.raises(ValueError, match="invalid literal"):
            await lanes.run("", LONG_TEXT + 1, int, "a")
        assert len(given_back) == 1

    run(work)
