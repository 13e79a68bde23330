"""The schema at `/openapi.json`: FastAPI describes requests, and this module the answers, which msgspec encodes."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from specdec.openai.errors import ErrorReply
from specdec.openai.messages_answer import InputTokens, MessageReply
from specdec.openai.replies import (
    JSON,
    Aborted,
    ChatCompletion,
    ChoiceScores,
    Completion,
    Detokenized,
    DraftUpdate,
    ModelCard,
    ModelList,
    Tokenized,
    Version,
)
from specdec.openai.responses_answer import ResponseReply

Responses = dict[int | str, dict[str, Any]]
REFERENCE = "#/components/schemas/{name}"
_ANSWERS = (
    *(Aborted, ChatCompletion, ChoiceScores, Completion, Detokenized, DraftUpdate, ErrorReply, ModelCard, ModelList),
    *(InputTokens, MessageReply, ResponseReply),
    *(Tokenized, Version),
)


def answers(kind: type[msgspec.Struct], *, may_stream: bool = False) -> Responses:
    """Return the description of a route's answers, for its decorator.

    Args:
        kind: the body of a JSON answer.
        may_stream: whether a request may ask for server-sent events.
    """
    content: dict[str, Any] = {JSON: {"schema": _reference(kind)}}
    if may_stream:
        # Without a schema: tools differ in whether one describes the stream or an event.
        content["text/event-stream"] = {}
    return {200: {"description": "The answer", "content": content}, **ERRORS}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=kind.__name__)}


_ERROR = {"content": {JSON: {"schema": _reference(ErrorReply)}}}
ERRORS: Responses = {
    "4XX": {"description": "A mistake in the request", **_ERROR},
    "5XX": {"description": "The server cannot answer now, or at all", **_ERROR},
}


def describe(app: FastAPI, *, has_keys: bool) -> None:
    """Have an application serve its schema.

    Args:
        has_keys: whether clients need an API key.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, has_keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(app: FastAPI, has_keys: bool) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, structs = msgspec.json.schema_components(_ANSWERS, ref_template=REFERENCE)
    components = schema["components"]
    # Errors of validation have OpenAI's shape.
    requests = {name: model for name, model in components["schemas"].items() if "ValidationError" not in name}
    assert not structs.keys() & requests.keys()
    components["schemas"] = requests | structs
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
    return schema
