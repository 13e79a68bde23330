"""One client's long texts and lists: refused at the edge by their size, or apart from other clients' requests."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from specdec.async_engine.client_threads import LONG_TEXT
from specdec.core.commands import Add
from specdec.models.tokenizer import Tokenizer
from specdec.text.detokenizer import Detokenizer
from tests.specdec.server.raw_client import post
from tests.specdec.server.running import PATIENCE, Served

# Characters of the longest name in the vocabulary, tokens of the context, and more characters than these can stand for.
LONGEST, CONTEXT = 5, 8192
TOO_LONG = "a" * (LONGEST * CONTEXT)
# More than any text may have.
HUGE = "a" * ((1 << 20) + 1)
COMPLETIONS, CHAT, RESPONSES, SCORES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/score_choices"
TALK = [{"role": "user", "content": "a"}]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of all texts that the server tokenizes."""
    lengths: list[int] = []
    for name in ("encode", "encode_batch"):
        method = getattr(Tokenizer, name)

        def recorded(
            self: Tokenizer, given: str | Sequence[str], *args: Any, _method: Any = method, **more: Any
        ) -> Any:
            lengths.extend([len(given)] if isinstance(given, str) else map(len, given))
            return _method(self, given, *args, **more)

        monkeypatch.setattr(Tokenizer, name, recorded)
    return lengths


TEXTS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": TOO_LONG}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", TOO_LONG]}, "prompt"),
    (COMPLETIONS, {"prompt": TOO_LONG, "echo": True, "max_tokens": 0}, "prompt"),
    (COMPLETIONS, {"prompt": HUGE, "truncate_prompt_tokens": 3}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "bad_words": [TOO_LONG]}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "stop": TOO_LONG}, "stop"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": TOO_LONG}, "cache_salt"),
    (CHAT, {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": TOO_LONG[:30_000]}] * 2}]}, "messages"),
    (CHAT, {"messages": [{"role": TOO_LONG, "content": "a"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "aaa"}] * 5000}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": HUGE}], "truncate_prompt_tokens": 3}, "messages"),
    (RESPONSES, {"input": TOO_LONG}, "input"),
    (RESPONSES, {"input": "a", "instructions": TOO_LONG}, "input"),
    (RESPONSES, {"input": HUGE, "truncation": "auto"}, "input"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": TOO_LONG}]}]}, "input"),
    (SCORES, {"prompt": TOO_LONG, "choices": ["a"]}, "prompt"),
    (SCORES, {"prompt": "a", "choices": ["a", TOO_LONG]}, "choices"),
    (SCORES, {"messages": [{"role": "user", "content": TOO_LONG}], "choices": ["a"]}, "messages"),
    ("/tokenize", {"prompt": HUGE}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": HUGE}]}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "param"), TEXTS, ids=lambda value: str(value)[:60])
def test_texts_that_are_too_long_are_not_tokenized(
    server: Served, encoded: list[int], path: str, body: dict[str, Any], param: str
) -> None:
    status, _, reply = server.send("POST", path, body)
    assert (status, reply["error"]["param"]) == (400, param)
    assert max(encoded, default=0) < 1000


MESSAGES = "/v1/messages"
OVERFLOWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "completion": (COMPLETIONS, {"prompt": "%"}, "prompt"),
    "tokens": (COMPLETIONS, {"prompt": [5] * CONTEXT}, "prompt"),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "%"}]}, "messages"),
    "response": (RESPONSES, {"input": "%"}, "input"),
    "message": (MESSAGES, {"messages": [{"role": "user", "content": "%"}], "max_tokens": 1}, "messages"),
    "scores": (SCORES, {"prompt": "%", "choices": ["a"]}, "prompt"),
    "choice": (SCORES, {"prompt": "a", "choices": ["%"]}, "choices"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("long", ["ab" * (CONTEXT // 2), TOO_LONG], ids=["tokens", "characters"])
@pytest.mark.parametrize("name", OVERFLOWS)
def test_clients_recognise_a_context_that_is_full(server: Served, name: str, long: str, stream: bool) -> None:
    """By OpenAI's code and words, or by Anthropic's words."""
    path, body, param = OVERFLOWS[name]
    raw = json.dumps({**body, **({} if path == SCORES else {"stream": stream})}).replace("%", long).encode()
    status, _, reply = server.send("POST", path, raw)
    error = reply["error"]
    assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert f"this model's maximum context length is {CONTEXT} tokens" in error["message"]
    assert "shorten" in error["message"]
    if param != "choices":
        shown = re.search(r"prompt is too long: (?:at least )?(\d+) tokens > (\d+) maximum", error["message"])
        assert shown is not None
        assert int(shown[1]) > int(shown[2]) == CONTEXT - 1


def test_texts_outside_the_prompt_are_not_tokenized(server: Served, encoded: list[int]) -> None:
    """The chat template shows neither; ids of clients are never read."""
    more = {"chat_template_kwargs": {"a": TOO_LONG}, "user": TOO_LONG, "tools": [{"type": "function", "function": {}}]}
    more["tools"][0]["function"] = {"name": "f", "description": TOO_LONG}
    assert server.send("POST", CHAT, {"messages": TALK, "max_tokens": 1, **more})[0] == 200
    assert max(encoded) < 1000


LISTS: list[tuple[str, Any]] = [
    ("bad_words", ["a"] * 129),
    ("stop", ["a"] * 65),
    ("stop_token_ids", [5] * 129),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("allowed_token_ids", [5] * 1025),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
@pytest.mark.parametrize(("name", "value"), LISTS, ids=[name for name, _ in LISTS])
def test_long_lists_are_refused_with_the_option_that_allows_them(
    server: Served, path: str, name: str, value: Any
) -> None:
    body = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": TALK}, RESPONSES: {"input": "a"}}[path]
    status, _, reply = server.send("POST", path, {**body, name: value})
    assert (status, reply["error"]["param"]) == (400, name)
    assert f"{name} holds {len(value)}; at most {len(value) - 1} are allowed: send fewer" in reply["error"]["message"]
    assert "--max-" in reply["error"]["message"]


def test_tokens_to_decode_are_limited(server: Served) -> None:
    status, _, reply = server.send("POST", "/detokenize", {"tokens": [5] * ((1 << 17) + 1)})
    assert (status, reply["error"]["param"]) == (400, "tokens")
    assert server.send("POST", "/detokenize", {"tokens": [5] * (1 << 17)})[0] == 200


class Gate:
    """Holds the tokenization of long texts until it opens.

    Attributes:
        begun: lengths of the long texts whose tokenization has begun.
    """

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._event = threading.Event()

    def open(self) -> None:
        self._event.set()

    def wait(self, texts: Sequence[str]) -> None:
        if (longest := max(map(len, texts))) > LONG_TEXT:
            self.begun.append(longest)
            self._event.wait(PATIENCE)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held = Gate()
    for name in ("encode", "encode_batch"):
        method = getattr(Tokenizer, name)

        def waiting(self: Tokenizer, given: str | Sequence[str], *args: Any, _method: Any = method, **more: Any) -> Any:
            held.wait([given] if isinstance(given, str) else given)
            return _method(self, given, *args, **more)

        monkeypatch.setattr(Tokenizer, name, waiting)
    yield held
    held.open()


async def begin(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Send requests with long texts, and leave them waiting."""
    request = post("/tokenize", {"prompt": "a" * (LONG_TEXT + 1)})
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await writer.drain()
        writers.append(writer)
    return writers


def test_short_requests_do_not_wait_for_long_texts(server: Served, gate: Gate) -> None:
    """More long texts than there are threads."""
    writers = server.call(begin(server.port, 40))
    while not gate.begun:
        time.sleep(0.01)
    for path, body in ((COMPLETIONS, {"prompt": "a", "max_tokens": 1}), (CHAT, {"messages": TALK, "max_tokens": 1})):
        assert server.send("POST", path, body)[0] == 200
    assert len(gate.begun) == 1
    server.call(leave(writers))
    gate.open()


async def leave(writers: Sequence[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.transport.abort()


def test_texts_of_clients_that_have_left_are_dropped(server: Served, gate: Gate) -> None:
    writers = server.call(begin(server.port, 5))
    while not gate.begun:
        time.sleep(0.01)
    server.call(leave(writers))
    gate.open()
    # Its text comes behind theirs.
    assert server.send("POST", "/tokenize", {"prompt": "a" * (LONG_TEXT + 2)})[0] == 200
    assert gate.begun == [LONG_TEXT + 1, LONG_TEXT + 2]


def test_stop_strings_are_searched_by_the_engine_alone(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server searches again where it reports steps, once for each output that has some."""
    made: list[int] = []

    def counted(*args: Any) -> Detokenizer:
        made.append(1)
        return Detokenizer(*args)

    monkeypatch.setattr("specdec.core.step_report.Detokenizer", counted)
    body = {"prompt": ["a", "b"], "n": 3, "stop": ["no such text"] * 64, "max_tokens": 2}
    assert server.send("POST", COMPLETIONS, body)[0] == 200
    assert not made
    assert server.send("POST", COMPLETIONS, {**body, "trace": True})[0] == 200
    assert len(made) == 6


def test_the_engine_gets_a_prediction_as_tokens(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps would wait for the tokenizer."""
    sent: list[Any] = []
    send = server.llm._connection.send

    def record(number: int, command: Any) -> None:
        sent.append(command)
        send(number, command)

    monkeypatch.setattr(server.llm._connection, "send", record)
    body = {"messages": TALK, "max_tokens": 1, "prediction": {"type": "content", "content": "abc"}}
    assert server.send("POST", CHAT, body)[0] == 200
    (add,) = [command for command in sent if isinstance(command, Add)]
    assert add.params.prediction == server.offline.get_tokenizer()("abc")["input_ids"]
