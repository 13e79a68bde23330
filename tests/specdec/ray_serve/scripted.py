"""Replicas without an engine, which do what a test wants."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from specdec.async_engine.messages import Add, Delta, News, decode_to_engine, encode
from specdec.core.outputs import SpeculationStats
from specdec.ray_serve.route import Route

LIMIT = 60.0
Act = Callable[[Add], Any] | BaseException | None


class Script:
    """Replicas that do what a test wants.

    Args:
        calls: what each call of `generate` yields and raises, in order; it waits at None.

    Attributes:
        tried: the replicas to avoid in each call.
    """

    def __init__(self, *calls: Sequence[Act], answers: Sequence[Any] = ()) -> None:
        self._calls, self._answers = iter(calls), answers
        self.tried: list[set[str]] = []
        self.aborted: list[str | None] = []

    async def start(self) -> None:
        pass

    async def generate(self, name: str, request: bytes, route: Route) -> AsyncIterator[bytes]:  # noqa: ARG002
        self.tried.append(set(route.avoid))
        add = decode_to_engine(request)
        assert isinstance(add, Add)
        for act in next(self._calls):
            if act is None:
                await asyncio.Event().wait()
            elif isinstance(act, BaseException):
                route.replica = f"r{len(self.tried)}"
                raise act
            else:
                route.replica = f"r{len(self.tried)}"
                yield encode(act(add))

    async def abort(self, name: str, route: Route) -> None:  # noqa: ARG002
        self.aborted.append(route.only)

    async def ask(self, question: bytes) -> Sequence[bytes]:  # noqa: ARG002
        return [encode(answer) for answer in self._answers]

    async def close(self) -> None:
        pass


def token(reason: str | None) -> Callable[[Add], News]:
    # The number is the replica's own.
    return lambda _: News([Delta(99, 0, [7], [False], [], "", SpeculationStats(), [], reason)])


def run_limited(work: Callable[[], Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(LIMIT):
            return await work()

    return asyncio.run(limited())
