"""Routes that read JSON bodies strictly: valid UTF-8, no halves of surrogate pairs, bounded depth."""

from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from specdec.openai.errors import ApiError


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        # By it the request's texts go to a lane of threads.
        self.state.body_size = len(body)
        try:
            # Some editors and clients begin files with a byte order mark.
            return from_json(body.removeprefix(BOM_UTF8))
        except ValueError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}") from None


class JsonRoute(APIRoute):
    """A route whose body is read by pydantic's JSON parser, which refuses text that has no UTF-8 form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json
