"""Several generators read as one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from specdec.server.merged import merged


class Source:
    """A generator that notes what it was asked for."""

    def __init__(self, count: int, fails: bool = False) -> None:
        self.count, self.fails = count, fails
        self.asked = 0
        self.is_closed = False

    async def values(self) -> AsyncGenerator[int]:
        try:
            for number in range(self.count):
                self.asked += 1
                await asyncio.sleep(0)
                yield number
            if self.fails:
                raise ValueError("failed")
        finally:
            self.is_closed = True


@pytest.mark.parametrize("counts", [[], [0], [3], [3, 0, 5], [1] * 9])
def test_every_value_comes_once_and_in_the_order_of_its_source(counts: list[int]) -> None:
    async def run() -> list[tuple[int, int]]:
        return [pair async for pair in merged([Source(count).values() for count in counts])]

    found = asyncio.run(run())
    for index, count in enumerate(counts):
        assert [value for source, value in found if source == index] == list(range(count))
    assert len(found) == sum(counts)


@pytest.mark.parametrize("count", [1, 3])
def test_closing_closes_every_source(count: int) -> None:
    sources = [Source(100) for _ in range(count)]

    async def run() -> None:
        async with aclosing(merged([source.values() for source in sources])) as both:
            async for _ in both:
                # Let the sources that were asked get as far as they can.
                await asyncio.sleep(0.01)
                break
        assert all(source.is_closed for source in sources)

    asyncio.run(run())
    # Nobody reads ahead for a slow reader.
    assert all(source.asked <= 2 for source in sources)


def test_closing_waits_for_no_value() -> None:
    waiting = Source(1)

    async def stalled() -> AsyncGenerator[int]:
        try:
            await asyncio.Event().wait()
            yield 0
        finally:
            waiting.is_closed = True

    async def run() -> None:
        async with asyncio.timeout(60), aclosing(merged([Source(1).values(), stalled()])) as both:
            assert await anext(both) == (0, 0)

    asyncio.run(run())
    assert waiting.is_closed


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_of_one_source_closes_the_others(count: int) -> None:
    sources = [Source(1, fails=True), *(Source(100) for _ in range(count - 1))]

    async def run() -> None:
        streams = [source.values() for source in sources]
        with pytest.raises(ValueError, match="failed"):
            async for _ in merged(streams):
                pass
        assert all(source.is_closed for source in sources)

    asyncio.run(run())
