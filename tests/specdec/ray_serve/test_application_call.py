"""Calls of an HTTP application without a socket: parts as they come, errors, and clients that leave."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.ray_serve.application_call import call


def application(answer: Any) -> ASGIApp:
    """An application whose every route answers so."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        response: Response = await answer(Request(scope, receive))
        await response(scope, receive, send)

    return run


async def collect(app: ASGIApp, body: dict[str, Any], request_id: str | None = None) -> list[tuple[int, bytes]]:
    return [reply async for reply in call(app, "/v1/x", body, request_id)]


def test_an_answer_has_its_status_and_the_request_its_fields() -> None:
    async def answer(request: Request) -> Response:
        fields = {"path": request.url.path, "method": request.method, "name": request.headers.get("x-request-id")}
        return JSONResponse({**fields, "body": await request.json()}, 418)

    ((status, content),) = asyncio.run(collect(application(answer), {"text": "é"}, "abc"))
    assert status == 418
    assert json.loads(content) == {"path": "/v1/x", "method": "POST", "name": "abc", "body": {"text": "é"}}


def test_parts_come_one_by_one() -> None:
    """The application is held back until a part has been taken, but for one part."""
    made: list[int] = []

    async def answer(_: Request) -> Response:
        async def parts() -> Any:
            for number in range(5):
                made.append(number)
                yield f"{number}"

        return StreamingResponse(parts())

    async def run() -> None:
        async with aclosing(call(application(answer), "/", {}, None)) as replies:
            taken = 0
            async for reply in replies:
                assert reply == (200, f"{taken}".encode())
                taken += 1
                await asyncio.sleep(0.01)
                assert len(made) <= taken + 2
        assert taken == 5

    asyncio.run(run())


def test_a_client_that_leaves_ends_the_answer() -> None:
    ended: list[str] = []

    async def answer(_: Request) -> Response:
        async def parts() -> Any:
            try:
                while True:
                    yield "x"
                    await asyncio.sleep(0)
            finally:
                ended.append("ended")

        return StreamingResponse(parts())

    async def run() -> None:
        async with aclosing(call(application(answer), "/", {}, None)) as replies:
            async for _ in replies:
                break
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert ended == ["ended"]


def test_errors_of_the_application_are_raised() -> None:
    async def answer(_: Request) -> Response:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(collect(application(answer), {}))


def test_an_answer_without_a_body() -> None:
    async def answer(_: Request) -> Response:
        return Response(status_code=204)

    assert asyncio.run(collect(application(answer), {})) == []
