"""Requests are freed as soon as they end: one of megabytes would otherwise stay until the next full collection."""

import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest
from starlette.requests import Request

from tests.specdec.server.running import Served, wait_until

FORM = {"structured_outputs": {"regex": "("}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "ab " * 100_000


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeakSet[Request]]:
    """Requests that are still held, while no garbage is collected."""
    found, begin = WeakSet[Request](), Request.__init__

    def init(request: Request, *args: Any, **kwargs: Any) -> None:
        begin(request, *args, **kwargs)
        found.add(request)

    monkeypatch.setattr(Request, "__init__", init)
    gc.disable()
    yield found
    gc.enable()


def chat(content: object, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


CASES: dict[str, tuple[str, object, int]] = {
    "chat": (CHAT, chat("ab"), 200),
    "chat, streamed": (CHAT, chat("ab", stream=True), 200),
    "chat, too long": (CHAT, chat(LONG), 400),
    "chat, too long, streamed": (CHAT, chat(LONG, stream=True), 400),
    "chat, a wrong part": (CHAT, chat([{"type": "image_url"}]), 400),
    "chat, a wrong type": (CHAT, chat("ab", temperature="hot"), 400),
    "chat, a wrong model": (CHAT, chat("ab", model="unknown"), 404),
    "no JSON": (CHAT, b"{", 400),
    "prompt": (COMPLETIONS, {"prompt": "ab", "max_tokens": 2}, 200),
    "prompts, one too long": (COMPLETIONS, {"prompt": ["ab", LONG]}, 400),
    "many stop strings": (COMPLETIONS, {"prompt": "ab", "stop": ["a"] * 100_000}, 400),
    "a wrong form": (COMPLETIONS, {"prompt": "ab", **FORM}, 400),
    "a wrong form, streamed": (
        COMPLETIONS,
        {"prompt": "ab", "stream": True, **FORM},
        400,
    ),
    "response": ("/v1/responses", {"input": "ab", "max_output_tokens": 2}, 200),
    "response, too long": ("/v1/responses", {"input": LONG}, 400),
    "text to tokenize": ("/tokenize", {"prompt": LONG}, 200),
    "choices, too long": ("/v1/score_choices", {"prompt": LONG, "choices": ["a"]}, 400),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_holds_a_request_that_has_ended(server: Served, requests: WeakSet[Request], case: str) -> None:
    path, body, status = CASES[case]
    assert server.send("POST", path, body)[0] == status
    wait_until(lambda: not requests)
