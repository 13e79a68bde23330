"""Errors of the HTTP interface, in OpenAI's shape."""

import re
from collections.abc import Mapping

import msgspec
from fastapi import Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from specdec.kernels.types.settings import ParameterError

# nginx's status for a request whose client has gone, seen in logs and metrics alone.
CLIENT_GONE = 499
# Beginning of the paths of Anthropic's API.
ANTHROPIC = "/v1/messages"
# Seconds after which a client may try again when the queue is full or the engine restarts.
RETRY_AFTER = 1
_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
# A validation error may quote a whole request.
_LONGEST_MESSAGE = 500


class ErrorBody(msgspec.Struct):
    """OpenAI's description of an error.

    Attributes:
        param: the request's field that is wrong.
        code: a word for programs.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    """Body of an answer that reports an error.

    Attributes:
        type: "error" in Anthropic's form.
    """

    error: ErrorBody
    type: str | msgspec.UnsetType = msgspec.UNSET


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class ApiError(HTTPException):
    """An error that a client gets to see.

    Args:
        status: HTTP status code.
        message: one line: what is wrong, what is allowed.
        param: the request's field that is wrong.
        code: a word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        headers = {"Retry-After": str(RETRY_AFTER)} if status == 503 else None
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def error_reply(error: HTTPException) -> ErrorReply:
    """Return the body that reports an error."""
    default = "invalid_request_error" if error.status_code < 500 else "server_error"
    kind = _TYPES.get(error.status_code, default)
    message = str(error.detail)[:_LONGEST_MESSAGE].encode(errors="backslashreplace").decode()
    return ErrorReply(ErrorBody(message, kind, getattr(error, "param", None), getattr(error, "code", None)))


def error_response(error: HTTPException, path: str = "") -> Response:
    """Return the answer that reports an error, in the form of the API that a path belongs to."""
    reply = error_reply(error)
    if path.startswith(ANTHROPIC):
        reply.type = "error"
    return Response(
        msgspec.json.encode(reply), error.status_code, dict(error.headers or {}), media_type="application/json"
    )


def path_of(scope: Scope) -> str:
    """Return a request's path within the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def bad_request(
    error: ValueError, names: Mapping[str, str] | None = None, fields: Mapping[str, str] | None = None
) -> ApiError:
    """Return the answer to a ValueError of the engine, which names the wrong field if it is a `ParameterError`.

    Args:
        names: the request's names of parameters, where they differ from the engine's.
        fields: the request's fields for parameters that it makes of several.
    """
    message, names = str(error), names or {}
    for own, name in names.items():
        # Not within the name of an option.
        message = re.sub(rf"(?<![\w-]){own}(?![\w-])", name, message)
    for own, name in (fields or {}).items():
        # A part of the parameter is no part of another field.
        message = message if name == own else re.sub(rf"^{own}\.\w+", name, message)
    field = error.field.partition(".")[0] if isinstance(error, ParameterError) else None
    sent = None if field is None else {**names, **(fields or {})}.get(field, field)
    return ApiError(400, message, param=sent, code=code_of(error))


def code_of(error: ValueError) -> str | None:
    """Return the word for programs of an error of the engine, None for most."""
    return error.code if isinstance(error, ParameterError) else None


def note_outcome(scope: Scope, error: HTTPException | ClientGoneError) -> None:
    """Keep how a request ended, for the log; see `outcome`.

    The error itself is not kept: its traceback holds frames that hold the request, a cycle.
    """
    if isinstance(error, HTTPException):
        scope["state"]["outcome"] = error.status_code, error_reply(error).error.message
    else:
        scope["state"]["outcome"] = CLIENT_GONE, "the client closed the connection"


def outcome(scope: Scope, status: int) -> tuple[int, str]:
    """Return the status of a request that has ended, and why it failed, empty if it did not.

    Args:
        status: that of the answer's head, which may have been sent before the request failed.
    """
    found: tuple[int, str] = scope["state"].get("outcome", (status, ""))
    return found
