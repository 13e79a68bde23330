"""Several asynchronous generators read as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the values of all generators as they come, each with the number of its generator.

    A generator is asked for its next value after the last one was taken, so nothing piles up for a slow reader.
    Closing this generator closes them all.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for value in only:
                yield 0, value
        return
    asked = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while asked:
            ready, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(ready, key=asked.__getitem__):
                try:
                    value = task.result()
                except StopAsyncIteration:
                    del asked[task]
                    continue
                yield asked[task], value
                index = asked.pop(task)
                asked[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
