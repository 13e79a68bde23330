"""The input of `/v1/responses` as messages of a conversation."""

from typing import Any

from specdec.core.chat_content import ContentFormat, template_messages
from specdec.openai.responses_request import ResponsesRequest


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
    given = ResponsesRequest.model_validate({"input": items}).messages()
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
