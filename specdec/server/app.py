"""The application: routes, middleware, the page and the form of errors."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from specdec import __version__
from specdec.async_engine.errors import EngineDeadError
from specdec.core.errors import QueueFullError
from specdec.openai.errors import CLIENT_GONE, ApiError, ClientGoneError, error_response, note_outcome, path_of
from specdec.server import operations, prompts
from specdec.server.gate import Gate
from specdec.server.openapi import describe
from specdec.server.service import Service
from specdec.server.viewer import page

# Names of types in the places of pydantic's errors that could be names of fields.
_TYPES = ("str", "int", "float", "bool", "none")


def build_app(service: Service) -> FastAPI:
    """Return the application of a service whose engine runs."""
    # The pages that FastAPI offers for its schema load code from other hosts.
    app = FastAPI(title="specdec", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for routes in (prompts, operations):
        app.include_router(routes.router)
    app.add_api_route("/", show_page, include_in_schema=False)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(ClientGoneError, on_client_gone)
    for refusal in (QueueFullError, EngineDeadError):
        app.add_exception_handler(refusal, on_refusal)
    describe(app, has_keys=bool(service.settings.api_key))
    app.add_middleware(Gate, service=service)
    if origins := service.settings.allowed_origins:
        headers = ["X-Request-Id"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=headers
        )
    return app


async def show_page() -> Response:
    """Return the page with a chat and its draft trees. It is static; its requests carry the API key."""
    html, policy = page()
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(html, headers=headers, media_type="text/html")


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer errors that routes raise, and unknown routes and methods."""
    assert isinstance(error, HTTPException)
    note_outcome(request.scope, error)
    return error_response(error, path_of(request.scope))


async def on_invalid_request(request: Request, error: Exception) -> Response:
    """Answer a body that is not what the route takes."""
    assert isinstance(error, RequestValidationError)
    return await on_http_error(request, _described(error.errors()))


async def on_refusal(request: Request, error: Exception) -> Response:
    """Answer what an engine does not do now, and may do later."""
    code = "queue_full" if isinstance(error, QueueFullError) else "engine_dead"
    return await on_http_error(request, ApiError(503, str(error), code=code))


async def on_client_gone(request: Request, error: Exception) -> Response:
    """End a request whose client went away before its answer began."""
    assert isinstance(error, ClientGoneError)
    note_outcome(request.scope, error)
    return Response(status_code=CLIENT_GONE)


def _described(errors: Sequence[Any]) -> ApiError:
    """Return the first wrong field; a field of several types has an error for each of them."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if not place:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    reasons = [one["msg"] for one in errors if len(one["loc"]) > 1 and str(one["loc"][1]) == place[0]]
    # A type of a union stands in the place as well.
    within = takewhile(lambda part: re.fullmatch("[a-z_]+|[0-9]+", part) and part not in _TYPES, place[1:])
    return ApiError(400, f"{'.'.join([place[0], *within])}: {'; or '.join(dict.fromkeys(reasons))}", param=place[0])
