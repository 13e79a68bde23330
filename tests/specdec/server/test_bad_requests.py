"""Bodies that are no requests: an answer of 4xx in OpenAI's shape, and a server that stays healthy."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import LLM
from specdec.async_engine.async_llm import AsyncLLM
from tests.profiles import num_cases
from tests.specdec.server.running import Served, engine_in_thread
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort"]
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "text": b'"prompt"',
    "list": b"[]",
    "null": b"null",
    "invalid UTF-8": b'{"prompt": "\xff\xfe", "request_id": "\xff"}',
    "half a pair": b'{"prompt": "\\ud800", "request_id": "\\ud800"}',
    "deep": b"[" * 100_000,
    "deep object": b'{"prompt":' * 5000,
    "huge number": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b', "tokens": 1, "request_id": 1, "messages": 1}',
    "not a number": b'{"prompt": "a", "temperature": NaN, "messages": 1, "tokens": 1, "request_id": 1}',
    "infinity": b'{"prompt": "a", "temperature": 1e999, "messages": 1, "tokens": 1, "request_id": 1}',
    "zeros": b"\x00" * 100,
}


def check_error(status: int, headers: dict[str, str], reply: Any) -> None:
    assert 400 <= status < 500
    assert headers["content-type"] == "application/json"
    assert set(reply) == {"error"}
    error = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]


# Fields that /tokenize does not have are ignored.
CASES = [
    (path, name)
    for path in POSTS
    for name in BODIES
    if path != "/tokenize" or name not in ("huge number", "not a number", "infinity")
]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_malformed_requests_are_refused(server: Served, path: str, name: str) -> None:
    check_error(*server.send("POST", path, BODIES[name]))
    assert server.send("GET", "/health")[0] == 200


@pytest.mark.parametrize("path", POSTS)
def test_other_content_types_are_refused(server: Served, path: str) -> None:
    check_error(*server.send("POST", path, b'{"prompt": "a"}', {"Content-Type": "text/plain"}))


@pytest.mark.parametrize(("method", "path"), [("GET", "/nowhere"), ("POST", "/v1/nowhere"), ("GET", POSTS[0])])
def test_unknown_routes_and_methods(server: Served, method: str, path: str) -> None:
    check_error(*server.send(method, path))


WRONG: list[dict[str, Any]] = [
    {"prompt": None},
    {"prompt": 1},
    {"prompt": [1, "a"]},
    {"prompt": [1.5]},
    {"prompt": [True]},
    {"prompt": [-1]},
    {"prompt": {}},
    {"prompt": [[]]},
    {"max_tokens": "9"},
    {"max_tokens": 1.5},
    {"max_tokens": True},
    {"max_tokens": -1},
    {"n": []},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"min_p": 2},
    {"presence_penalty": 3},
    {"repetition_penalty": 0},
    {"logit_bias": []},
    {"logit_bias": {"1": "a"}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {"05": 1}},
    {"logit_bias": {" 5 ": 1}},
    {"logprobs": True},
    {"logprobs": -1},
    {"seed": -2},
    {"stop": 1},
    {"stop": [""]},
    {"stop": [1]},
    {"stop_token_ids": ["a"]},
    {"stop_token_ids": [5000]},
    {"allowed_token_ids": []},
    {"bad_words": [""]},
    {"min_tokens": 17},
    {"stream": "yes"},
    {"stream_options": 1, "stream": True},
    {"cache_salt": 1},
    {"priority": 0.5},
    {"model": 1},
    {"response_format": "json"},
    {"echo": 1},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_wrong_types_and_values_are_refused(server: Served, wrong: dict[str, Any], stream: bool) -> None:
    """Streams too: their answer has not begun when the mistake shows."""
    status, headers, reply = server.send("POST", "/v1/completions", {"prompt": "a", "stream": stream, **wrong})
    check_error(status, headers, reply)
    assert status == 400


def test_the_place_of_what_is_wrong_is_told(server: Served) -> None:
    talk: list[Any] = [{"role": "user", "content": "a"}] * 3
    tool = {"type": "function", "function": {"name": "f"}}
    for body, place in (
        ({"messages": [*talk, {"role": "user", "content": 5}]}, "messages.3.content: "),
        ({"messages": talk, "tools": [tool, {"name": "g"}]}, "tools.1.type: "),
        ({"messages": talk, "top_p": "a"}, "top_p: "),
    ):
        error = server.send("POST", "/v1/chat/completions", body)[2]["error"]
        assert error["message"].startswith(place)
        assert error["param"] == place.partition(".")[0].removesuffix(": ")


MESSAGES: list[Any] = [
    [1],
    ["hi"],
    [{}],
    [{"role": 1, "content": "a"}],
    [{"role": "user", "content": 1}],
    [{"role": "user", "content": [1]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": 1}],
]


@pytest.mark.parametrize("messages", MESSAGES, ids=str)
def test_wrong_messages_are_refused(server: Served, messages: Any) -> None:
    check_error(*server.send("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1}))


TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
# What a route declares with others and cannot serve.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/responses", {"input": "a"}, {"prompt_logprobs": 0}),
    ("/v1/responses", {"input": "a"}, {"return_token_ids": True}),
    ("/v1/responses", {"input": "a"}, {"return_meta_info": True}),
    ("/v1/responses", {"input": "a", "stream": True}, {"stream_options": {"continuous_usage_stats": True}}),
    ("/v1/chat/completions", TALK, {"add_special_tokens": True}),
    ("/tokenize", {"messages": TALK["messages"]}, {"add_special_tokens": True}),
    ("/tokenize", {"prompt": "a"}, {"continue_final_message": True}),
    ("/v1/score_choices", {"prompt": "a", "choices": ["b"]}, {"chat_template_kwargs": {"a": 1}}),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED, ids=str)
def test_no_declared_field_is_ignored(server: Served, path: str, body: dict[str, Any], field: dict[str, Any]) -> None:
    (name,) = field
    assert server.send("POST", path, body)[0] == 200
    status, headers, reply = server.send("POST", path, {**body, **field})
    check_error(status, headers, reply)
    assert reply["error"]["param"] == name
    assert server.send("POST", path, {**body, **dict.fromkeys(field)})[0] == 200


@pytest.mark.long
def test_a_body_of_more_prompts_than_may_wait_is_a_mistake(folders: Tiny) -> None:
    """Not a full queue: trying again would never help, however idle the server is."""
    own: dict[str, Any] = {"dtype": "float64", "kv_cache_memory": 1 << 20, "max_queued_requests": 3, "max_num_seqs": 2}
    offline = LLM(folders.target, None, **own)
    with engine_in_thread(AsyncLLM(folders.target, None, **own), offline) as engine, engine.again() as server:
        body = {"prompt": ["a"] * 4, "max_tokens": 2}
        status, headers, reply = server.send("POST", "/v1/completions", body)
        check_error(status, headers, reply)
        assert status == 400
        assert reply["error"]["message"] == "prompt holds 4 prompts; at most 3 may wait here: send fewer at once"
        assert reply["error"]["param"] == "prompt"
        for fits in ({**body, "prompt": ["a"] * 3}, {**body, "prompt": "a", "n": 8, "seed": 1}):
            status, _, reply = server.send("POST", "/v1/completions", fits)
            assert status == 200
            assert len(reply["choices"]) in (3, 8)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    *("prompt", "messages", "model", "n", "temperature", "top_p", "top_k", "stop", "logit_bias", "logprobs", "echo"),
    *("top_logprobs", "seed", "min_tokens", "stream_options", "tools", "tool_choice", "response_format", "priority"),
    *("cache_salt", "stop_token_ids", "allowed_token_ids", "bad_words", "prompt_logprobs", "truncate_prompt_tokens"),
    *("chat_template_kwargs", "continue_final_message", "suffix", "best_of", "skip_special_tokens", "tokens"),
]


@pytest.mark.long
@settings(max_examples=num_cases(150))
@given(path=st.sampled_from(POSTS), body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_no_body_makes_the_server_fail(server: Served, path: str, body: dict[str, Any]) -> None:
    base = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "request_id": "none"}
    given = {**({} if path == "/tokenize" else base), **body, "max_tokens": 1}
    try:
        raw = msgspec.json.encode(given)
    except (UnicodeEncodeError, OverflowError):
        return
    status, headers, reply = server.send("POST", path, raw)
    if status != 200:
        check_error(status, headers, reply)


def test_nothing_is_left_of_bad_requests(server: Served) -> None:
    server.wait_until_idle()
    assert server.send("GET", "/health")[0] == 200
