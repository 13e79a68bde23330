"""Replicas without an engine, which do what a test wants."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from specdec.async_engine.messages import ReplyTo, decode_command, encode
from specdec.core.commands import Add, Delta, EngineReply, News, Refused
from specdec.core.outputs import SpeculationStats
from specdec.ray_serve.replicas import Route

LIMIT = 60.0
Act = EngineReply | BaseException | None


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

    async def generate(self, name: str, command: bytes, route: Route) -> AsyncIterator[bytes]:  # noqa: ARG002
        self.tried.append(set(route.avoid))
        assert isinstance(decode_command(command), Add)
        for act in next(self._calls):
            if act is None:
                await asyncio.Event().wait()
            elif isinstance(act, BaseException):
                route.replica = f"r{len(self.tried)}"
                raise act
            else:
                route.replica = f"r{len(self.tried)}"
                yield encode([sent(act)])

    async def abort(self, name: str, route: Route) -> None:  # noqa: ARG002
        self.aborted.append(route.only)

    async def ask(self, command: bytes) -> Sequence[bytes]:  # noqa: ARG002
        return [encode(sent(answer)) for answer in self._answers]

    async def close(self) -> None:
        pass


def sent(reply: EngineReply) -> ReplyTo:
    """Return a reply as a replica sends it; the number is the replica's own."""
    is_last = isinstance(reply, Refused) or (isinstance(reply, News) and reply.deltas[-1].finish_reason is not None)
    return ReplyTo.of(99, is_last, reply)


def token(reason: str | None) -> News:
    return News([Delta(0, [7], [False], [], "", SpeculationStats(), [], reason)])


def run_limited(work: Callable[[], Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(LIMIT):
            return await work()

    return asyncio.run(limited())
