"""Answers to errors that routes raise, for FastAPI's exception handlers."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from specdec.openai.errors import CLIENT_GONE, ApiError, ClientGoneError, error_response, note_outcome, path_of


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer errors that routes raise, and unknown routes and methods."""
    assert isinstance(error, HTTPException)
    note_outcome(request.scope, error)
    return error_response(error, path_of(request.scope))


async def on_invalid_request(request: Request, error: Exception) -> Response:
    """Answer a body that is not what the route takes."""
    assert isinstance(error, RequestValidationError)
    return await on_http_error(request, _described(error.errors()))


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
    return ApiError(400, f"{place[0]}: {'; or '.join(dict.fromkeys(reasons))}", param=place[0])
