"""Messages as clients send them in a history, and as chat templates read them."""

from typing import Any

import pytest

from specdec.core.chat_content import ContentFormat, template_messages

CALL = {"id": "1", "type": "function", "function": {"name": "taxi", "arguments": '{"to": "Davis"}'}}
READ = {**CALL, "function": {"name": "taxi", "arguments": {"to": "Davis"}}}


def read(*messages: Any, format: ContentFormat = ContentFormat.STRING, **more: Any) -> list[dict[str, Any]]:
    return template_messages(messages, lambda _: format, **more)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"role": "user", "content": []}, {"role": "user", "content": ""}),
    ({"role": "user"}, {"role": "user", "content": ""}),
    ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
    (
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [READ]},
    ),
    ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
    ({"role": "assistant", "content": "a", "tool_calls": None}, {"role": "assistant", "content": "a"}),
    # As OpenAI's package gives a message back.
    (
        {
            **{"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None},
            **{"function_call": None, "tool_calls": None},
        },
        {"role": "assistant", "content": "a", "annotations": []},
    ),
    ({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": "No."}),
    (
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": "No."},
    ),
    (
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "tool", "tool_call_id": "1", "content": "a\nb"},
    ),
    (
        {"role": "assistant", "content": "a", "reasoning": "r"},
        {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"},
    ),
    ({"role": "user", "content": "a", "name": "Ann"}, {"role": "user", "content": "a", "name": "Ann"}),
]


@pytest.mark.parametrize(("given", "expected"), CASES, ids=str)
def test_contents_that_clients_send(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read(given) == [expected]
    # As parts: the same text.
    (parts,) = read(given, format=ContentFormat.PARTS)
    assert isinstance(parts["content"], list)
    assert "\n".join(part["text"] for part in parts["content"]) == expected["content"]
    assert {**parts, "content": expected["content"]} == expected


@pytest.mark.parametrize("arguments", ["", " ", None, "{}", "null", {}])
def test_calls_without_arguments(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = read({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    (message,) = read({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_a_template_that_knows_developers_gets_them() -> None:
    assert read({"role": "developer", "content": "a"}, knows_developers=True)[0]["role"] == "developer"


def test_ids_of_calls_have_the_length_that_the_template_wants() -> None:
    """9 letters and digits, for Mistral's, whichever server has made them."""
    for given, short in (("call_0123456789abcdef01234567", "f01234567"), ("a-1", "0000000a1"), ("abcdefghi",) * 2):
        call = {"id": given, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        answer, result = (
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": given, "content": "a"},
        )
        first, second = template_messages([answer, result], lambda _: ContentFormat.STRING, has_short_ids=True)
        assert first["tool_calls"][0]["id"] == second["tool_call_id"] == short
        assert call["id"] == given


@pytest.mark.parametrize(
    "wrong",
    [
        "a",
        {"content": "a"},
        {"role": 1, "content": "a"},
        {"role": "user", "content": 1},
        {"role": "user", "content": {"type": "text", "text": "a"}},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": ["text"], "text": "a"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "user", "content": "\ud800"},
        {"role": "user", "content": ["\ud800"]},
        {"role": "assistant", "tool_calls": "f"},
        {"role": "assistant", "tool_calls": ["f"]},
        {"role": "assistant", "tool_calls": [{"name": "f"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    ],
    ids=str,
)
def test_invalid_messages_are_told(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        read(wrong)
