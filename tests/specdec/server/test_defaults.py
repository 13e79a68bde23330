"""Requests that spell out defaults, as many clients do, are those that leave them out. Errors name what was sent."""

import logging
from typing import Any

import pytest

from specdec.models.tokenizer import Tokenizer
from specdec.openai.answer_settings import ToolCallParserChoice
from specdec.openai.chat_request import ChatRequest
from specdec.openai.completion_request import CompletionRequest
from specdec.openai.operation_requests import TokenizeRequest
from specdec.openai.request_model import RequestModel
from specdec.openai.responses_request import ResponsesRequest
from specdec.server.server_settings import ServerSettings
from specdec.server.service import Service
from tests.specdec.server.running import Served

pytestmark = pytest.mark.slow

# The tiny model's context.
CONTEXT = 8192
TALK = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/tokenize": {"messages": TALK},
}
# Values by which OpenAI's and vLLM's schemas say that nothing is asked for, and which clients send.
SAMPLING: dict[str, list[Any]] = {
    **{key: [0, 0.0] for key in ("frequency_penalty", "presence_penalty", "min_p")},
    **{key: [1] for key in ("temperature", "top_p", "repetition_penalty", "n")},
    **{key: [[]] for key in ("stop", "stop_token_ids", "bad_words", "logits_processors")},
    **{key: [False] for key in ("stream", "ignore_eos", "include_stop_str_in_output", "use_beam_search")},
    **{key: [True] for key in ("skip_special_tokens", "spaces_between_special_tokens")},
    **{key: [None] for key in ("guided_json", "guided_regex", "guided_choice", "prompt_embeds", "chat_template")},
    **{"seed": [-1, 0], "top_k": [-1, 0], "logit_bias": [{}], "min_tokens": [0], "priority": [0], "user": [""]},
    **{"truncate_prompt_tokens": [-1], "stream_options": [{}, {"include_usage": False}], "store": [False, True]},
    **{
        "metadata": [{}],
        "service_tier": ["auto", "default"],
        "response_format": [{"type": "text"}],
        "length_penalty": [1],
    },
    **{"vllm_xargs": [None], "kv_transfer_params": [None], "request_id": ["x"], "return_tokens_as_token_ids": [False]},
}
CALLS: dict[str, list[Any]] = {
    **{"tools": [[]], "tool_choice": ["none", "auto"], "parallel_tool_calls": [True, False], "top_logprobs": [0]},
    **{"prompt_cache_key": [""], "safety_identifier": [""], "reasoning": [{}], "verbosity": ["medium"]},
}
OPENED: dict[str, list[Any]] = {
    **{"add_generation_prompt": [True], "continue_final_message": [False], "add_special_tokens": [False]},
    **{"chat_template_kwargs": [{}], "documents": [[]], "chat_template": [""], "mm_processor_kwargs": [None]},
}
DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "/v1/chat/completions": {
        **SAMPLING,
        **CALLS,
        **OPENED,
        **{"functions": [[]], "function_call": ["none", "auto"], "modalities": [["text"], []], "audio": [{}]},
        **{"logprobs": [False], "echo": [False], "include_reasoning": [True]},
    },
    "/v1/completions": {**SAMPLING, "best_of": [1], "echo": [False], "suffix": [""], "add_special_tokens": [True]},
    "/v1/responses": {
        **SAMPLING,
        **CALLS,
        **{"truncation": ["disabled", "auto"], "background": [False], "include": [[]], "instructions": [""]},
        **{"text": [{}, {"format": {"type": "text"}}], "conversation": [""], "previous_response_id": [""]},
    },
    "/tokenize": {**OPENED, "tools": [[]], "return_token_strs": [False]},
}
MODELS: dict[str, type[RequestModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
}


def text(server: Served, path: str, **more: Any) -> Any:
    """What a request generates, or its error."""
    greedy = {} if path == "/tokenize" or "temperature" in more else {"temperature": 0}
    status, _, reply = server.send("POST", path, {**BODIES[path], **greedy, **more})
    if status != 200:
        return reply["error"]
    if path == "/v1/chat/completions":
        return reply["choices"][0]["message"]
    return reply["tokens"] if path == "/tokenize" else reply.get("choices") or reply["output"][0]["content"]


@pytest.mark.parametrize("path", DEFAULTS)
def test_defaults_are_no_errors(server: Served, path: str) -> None:
    plain = text(server, path)
    assert "message" not in plain
    for name, values in DEFAULTS[path].items():
        for value in values:
            found = text(server, path, **{name: value})
            # At temperature 1, the text is drawn.
            assert "message" not in found if name == "temperature" else found == plain, (name, value, found)
    # All at once.
    both = {name: values[0] for name, values in DEFAULTS[path].items()}
    assert text(server, path, **{**both, **({} if path == "/tokenize" else {"temperature": 0})}) == plain


@pytest.mark.parametrize("path", MODELS)
def test_null_stands_for_a_field_that_is_left_out(server: Served, path: str) -> None:
    names = {*MODELS[path].model_fields, *DEFAULTS[path], "modalities", "functions", "documents", "logits_processors"}
    nulls = dict.fromkeys(names - BODIES[path].keys() - ({"temperature"} if path != "/tokenize" else set()))
    assert text(server, path, **nulls) == text(server, path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("function_call", {"name": "f"}),
        ("documents", [{"text": "a"}]),
        ("chat_template", "a"),
        ("audio", {"voice": "a"}),
        ("logits_processors", ["a"]),
    ],
)
def test_fields_with_an_effect_are_still_refused(server: Served, name: str, value: Any) -> None:
    assert text(server, "/v1/chat/completions", **{name: value})["param"] == name


def test_a_template_is_refused_by_every_route_that_has_messages(server: Served) -> None:
    assert text(server, "/tokenize", chat_template="a")["param"] == "chat_template"
    body = {"messages": TALK, "choices": ["a"], "chat_template": "a"}
    assert server.send("POST", "/v1/score_choices", body)[2]["error"]["param"] == "chat_template"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/responses", "max_tokens"),
    ],
)
def test_errors_name_the_parameter_that_was_sent(server: Served, path: str, name: str) -> None:
    body = {key: value for key, value in BODIES[path].items() if not key.startswith("max_")}
    for value in (0, -1):
        error = server.send("POST", path, {**body, name: value})[2]["error"]
        assert error["param"] == name
        assert error["message"].startswith(f"{name} is {value};")
    error = server.send("POST", path, {**body, name: 2, "min_tokens": 3})[2]["error"]
    assert error["param"] == "min_tokens"
    assert f" {name}, 2" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_long_prompt_is_cut_to_leave_room(server: Served, path: str) -> None:
    auto: dict[str, Any] = {"truncate_prompt_tokens": -1}
    key = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}[path]
    long: Any = "ab" * CONTEXT
    body = {key: [{"role": "user", "content": long}] if key == "messages" else long}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    for more in (auto, {"truncation": "auto"})[: 1 + (path == "/v1/responses")]:
        status, _, reply = server.send("POST", path, {**body, **more, limit: 3})
        assert status == 200, reply
        usage = reply["usage"]
        assert usage.get("prompt_tokens", usage.get("input_tokens")) == CONTEXT - 3
        assert reply.get("truncation", "disabled") == more.get("truncation", "disabled")
    assert server.send("POST", path, {**body, limit: 3})[0] == 400
    # What fits is not cut, whatever the limit.
    short: Any = {key: [{"role": "user", "content": "ab"}] if key == "messages" else "ab", limit: CONTEXT}
    counts = [server.send("POST", path, {**short, **more})[2]["usage"] for more in ({}, auto)]
    assert len({usage.get("prompt_tokens", usage.get("input_tokens")) for usage in counts}) == 1
    for wrong in (0, -2):
        error = server.send("POST", path, {**body, "truncate_prompt_tokens": wrong})[2]["error"]
        assert error["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/v1/models", "/metrics", "/"])
def test_heads(server: Served, path: str) -> None:
    status, headers, _ = server.send("GET", path)
    assert status == 200
    status, found, body = server.send("HEAD", path)
    assert (status, body) == (200, b"")
    assert found.get("content-type") == headers.get("content-type")
    assert server.send("HEAD", "/nowhere")[0] == 404
    assert server.send("HEAD", "/v1/completions")[0] == 405
    assert server.send("GET", path)[0] == 200


def test_a_body_may_begin_with_a_byte_order_mark(server: Served) -> None:
    for body, expected in ((b'\xef\xbb\xbf{"prompt": "a"}', 200), (b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}', 400)):
        assert server.send("POST", "/tokenize", body)[0] == expected


def test_tools_without_a_known_form_of_calls_are_warned_of_once(
    engine: Served, caplog: pytest.LogCaptureFixture
) -> None:
    body = {**BODIES["/v1/chat/completions"], "tools": [{"type": "function", "function": {"name": "taxi"}}]}
    for choice, warnings in (("auto", 1), ("none", 0), ("hermes", 0)):
        with caplog.at_level(logging.WARNING), engine.again(tool_call_parser=choice) as served:
            caplog.clear()
            for _ in range(2):
                assert served.send("POST", "/v1/chat/completions", {**body, "tool_choice": "none"})[0] == 200
            assert "--tool-call-parser" not in caplog.text
            for _ in range(2):
                assert served.send("POST", "/v1/chat/completions", body)[0] == 200
            assert caplog.text.count("--tool-call-parser") == warnings


def test_a_template_with_tools_and_no_known_form_of_calls_is_warned_of_at_start(
    engine: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = {
        "{{ tools }}": 1,
        "{{ messages }}": 0,
        "{{ tools }}<tool_call>": 0,
        '{{ tools }}{"name": "f", "parameters": {}}': 0,
    }
    chosen = list(templates)[2:]
    monkeypatch.setattr(engine.llm, "tokenizer", Tokenizer(engine.llm.config.model))
    choices: tuple[ToolCallParserChoice, ...] = ("auto", "none")
    for template, warnings in templates.items():
        for choice in choices:
            with caplog.at_level(logging.INFO, "specdec"):
                Service(engine.llm, ServerSettings(port=0, tool_call_parser=choice, chat_template=template), "tiny")
            assert ("as the chat template shows" in caplog.text) == (choice == "auto" and template in chosen)
            assert caplog.text.count("--tool-call-parser") == (warnings if choice == "auto" else 0), template
            caplog.clear()
