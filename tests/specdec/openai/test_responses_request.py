"""The input of `/v1/responses` as messages of a conversation."""

import json
from typing import Any

import pytest

from specdec.core.chat_content import ContentFormat, template_messages
from specdec.openai.errors import ApiError
from specdec.openai.responses_request import ResponsesRequest

SEARCH = {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "a"}}
CODEX: dict[str, Any] = {
    "input": [
        {"role": "user", "content": "a"},
        SEARCH,
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."},
        SEARCH,
        {"role": "user", "content": "b"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
        {"type": "web_search", "external_web_access": True},
        {"type": "web_search"},
    ],
    "reasoning": {"effort": "low", "summary": "auto"},
}


def test_tools_and_items_of_other_servers_are_left_out() -> None:
    body = ResponsesRequest.model_validate(CODEX)
    function = {"name": "shell", "parameters": {"type": "object"}}
    arguments = body.template_arguments()
    assert arguments["tools"] == [{"type": "function", "function": function}]
    assert body.functions == CODEX["tools"][:1]
    assert body.ignored() == [
        "tools of type 'custom'",
        "tools of type 'namespace'",
        "tools of type 'web_search'",
        "input items of type 'web_search_call'",
    ]
    patch = {"name": "apply_patch", "arguments": json.dumps({"input": "*** Begin"})}
    assert body.chat_messages() == [
        {"role": "user", "content": ["a"]},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": patch}]},
        {"role": "tool", "content": ["Done."], "tool_call_id": "c"},
        {"role": "user", "content": ["b"]},
    ]


def test_functions_of_items_are_offered() -> None:
    """As Codex sends them."""
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    item = {"type": "additional_tools", "role": "developer", "tools": [function, {"type": "custom", "name": "c"}]}
    given = {"input": [item, {"role": "user", "content": "a"}], "tool_choice": "required"}
    body = ResponsesRequest.model_validate(given)
    assert body.functions == [function]
    assert body.calls.is_forced
    assert body.template_arguments()["tools"][0]["function"]["name"] == "f"
    assert body.ignored() == ["tools of type 'custom'"]
    assert body.chat_messages() == [{"role": "user", "content": ["a"]}]


@pytest.mark.parametrize(
    "choice", [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "function", "name": "n"}]
)
def test_a_choice_of_what_is_left_out_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=str(choice.get("name", choice["type"]))) as caught:
        _ = ResponsesRequest.model_validate({**CODEX, "tool_choice": choice}).calls
    assert (caught.value.status_code, caught.value.param) == (400, "tool_choice")


def test_items_of_one_turn_are_one_message() -> None:
    """Reasoning, texts and calls that follow each other, whichever of them there are."""

    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    def asked(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}

    def said(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    results = [{"type": "function_call_output", "call_id": name, "output": name} for name in ("f", "g")]
    answer = {"role": "assistant", "content": "Done."}
    items = [
        {"role": "user", "content": "a"},
        *(thought, said("I look."), call("f"), said("And more."), call("g")),
        *results,
        *(thought, call("f")),
        results[0],
        *(thought, answer),
        {"role": "user", "content": []},
        thought,
        {"role": "user", "content": "b"},
    ]
    given = ResponsesRequest.model_validate({"input": items}).chat_messages()
    tools = [{"role": "tool", "content": name, "tool_call_id": name} for name in ("f", "g")]
    expected: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I look.\nAnd more.", "tool_calls": [asked("f"), asked("g")]},
        *tools,
        {"role": "assistant", "content": "", "tool_calls": [asked("f")]},
        tools[0],
        answer,
        {"role": "user", "content": ""},
        {"role": "user", "content": "b"},
    ]
    for message in expected[1], expected[4], expected[6]:
        message["reasoning"] = "Hm."
    read, plain = (template_messages(each, lambda _: ContentFormat.STRING) for each in (given, expected))
    assert read == plain
