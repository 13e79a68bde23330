"""Event streams whose events are late: comments keep the connection, and errors still show."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from specdec.openai.connection import DONE, EventStream, error_event
from specdec.openai.errors import ApiError

COMMENT = b": keep-alive\n\n"
ERROR = ApiError(503, "no engine")


class Connection:
    """What a stream sends to its client.

    Attributes:
        bodies: parts of the body.
        is_kept: set once a comment was sent.
    """

    def __init__(self) -> None:
        self.starts = 0
        self.bodies: list[bytes] = []
        self.is_kept = asyncio.Event()

    async def send(self, message: Message) -> None:
        # A client that reads slowly.
        await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            assert not self.bodies
            self.starts += 1
            return
        self.bodies.append(message["body"])
        if message["body"] == COMMENT:
            self.is_kept.set()

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def run(self, events: AsyncGenerator[bytes], interval: float) -> None:
        scope = {"type": "http", "state": {}}
        await EventStream(events, 0, interval, error_event)(scope, self.receive, self.send)


@pytest.mark.parametrize("fails", [False, True])
def test_a_comment_is_sent_while_no_event_comes(fails: bool) -> None:
    """It begins the answer, so an error behind it is an event."""

    async def work() -> None:
        connection = Connection()

        async def events() -> AsyncGenerator[bytes]:
            for _ in range(2):
                connection.is_kept.clear()
                await connection.is_kept.wait()
                if fails:
                    raise ERROR
                yield b"data: 1\n\n"

        await connection.run(events(), 0.001)
        assert connection.starts == 1
        assert connection.bodies[0] == COMMENT
        *others, end = [body for body in connection.bodies if body != COMMENT]
        assert end == b""
        if fails:
            (last,) = others
            assert last.startswith(b'data: {"error":{"message":"no engine"')
            assert last.endswith(DONE)
        else:
            assert others == [b"data: 1\n\n"] * 2
            assert connection.bodies[connection.bodies.index(b"data: 1\n\n") + 1] == COMMENT

    asyncio.run(work())


@pytest.mark.parametrize("interval", [0, 3600])
def test_an_error_before_the_first_comment_has_its_own_status(interval: float) -> None:
    async def work() -> None:
        connection = Connection()

        async def events() -> AsyncGenerator[bytes]:
            await asyncio.sleep(0.01)
            if connection.bodies == []:
                raise ERROR
            yield b""

        with pytest.raises(ApiError) as caught:
            await connection.run(events(), interval)
        assert caught.value is ERROR
        assert (connection.starts, connection.bodies) == (0, [])
        # Nothing goes on behind the answer.
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(work())
