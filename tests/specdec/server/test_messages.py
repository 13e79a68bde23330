"""`/v1/messages`, whole and streamed, with tools and thinking; through Anthropic's client where it is installed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from specdec import LLM
from specdec.async_engine.async_llm import AsyncLLM
from specdec.openai.messages_request import MessagesRequest
from tests.specdec.server.running import Served, engine_in_thread
from tests.specdec.thinking_chain import CALLED, ENGINE, SERVER, TEXT, THOUGHT, save_thinking_chain

pytestmark = pytest.mark.slow

TALK: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"name": "f", "description": "Do.", "input_schema": {"type": "object", "properties": {}}}]
OFF: Any = {"type": "disabled"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("messages") / "target"
    save_thinking_chain(folder)
    with (
        engine_in_thread(AsyncLLM(folder, "ngram", **ENGINE), LLM(folder, None, **ENGINE)) as engine,
        engine.again(**SERVER, api_key=["secret"]) as served,
    ):
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=served.url, api_key="secret", max_retries=0) as client:
        yield client


KEY = {"x-api-key": "secret"}


def test_the_events_of_a_stream_add_up_to_the_whole(served: Served) -> None:
    body = {"messages": TALK, "max_tokens": 40, "temperature": 0, "tools": TOOLS}
    status, _, whole = served.send("POST", "/v1/messages", body, KEY)
    assert status == 200, whole
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    _, _, reply = served.send("POST", "/v1/messages", {**body, "stream": True}, KEY)
    events = [json.loads(line.removeprefix("data: ")) for line in reply.decode().splitlines() if line[:6] == "data: "]
    assert [line for line in reply.decode().splitlines() if line[:7] == "event: "] == [
        f"event: {event['type']}" for event in events
    ]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]

    def joined(name: str) -> str:
        return "".join(delta.get(name, "") for delta in deltas)

    assert (joined("thinking"), joined("text")) == (THOUGHT, TEXT)
    assert json.loads(joined("partial_json")) == whole["content"][2]["input"] == CALLED
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def ask(client: Any, **given: Any) -> Any:
    """The whole message; the streamed one is the same."""
    given = {"model": "tiny", "max_tokens": 40, "messages": TALK, "extra_body": {"temperature": 0}, **given}
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")

    def told(message: Any) -> Any:
        blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
        return blocks, message.stop_reason, message.stop_sequence, message.usage.output_tokens

    assert told(final) == told(whole)
    return whole


def test_thinking_text_and_calls_are_blocks(client: Any) -> None:
    message = ask(client, tools=TOOLS)
    thought, text, call = message.content
    assert (thought.type, thought.thinking) == ("thinking", THOUGHT)
    assert (text.type, text.text) == ("text", TEXT)
    assert (call.type, call.name, call.input) == ("tool_use", "f", CALLED)
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens == 2
    usage = client.messages.create(model="tiny", max_tokens=1, messages=TALK, tools=TOOLS).usage
    count = client.messages.count_tokens(model="tiny", messages=TALK, tools=TOOLS).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == count


def test_thinking_is_limited_and_switched_off(client: Any) -> None:
    limited = ask(client, thinking={"type": "enabled", "budget_tokens": 1}, max_tokens=5)
    assert [block.type for block in limited.content] == ["thinking", "text"]
    assert limited.content[0].thinking == " hello"
    off = ask(client, thinking=OFF, max_tokens=1)
    assert [(block.type, block.text) for block in off.content] == [("text", TEXT)]
    assert off.stop_reason == "max_tokens"
    stopped = ask(client, thinking=OFF, stop_sequences=["rld"])
    assert [block.text for block in stopped.content] == [" wo"]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "rld")
    # The model goes on with the answer that the last message begins.
    begun = [*TALK, {"role": "assistant", "content": "hello </think>"}]
    assert ask(client, messages=begun, max_tokens=1).content[0].text == TEXT


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_calls_may_be_forced(client: Any, choice: Any) -> None:
    message = ask(client, tools=TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True})
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    assert (message.content[1].name, message.content[1].input) == ("f", {})
    none = ask(client, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=5)
    assert [block.type for block in none.content] == ["thinking", "text"]


def test_a_conversation_is_a_chat() -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "17"}]},
                {"type": "tool_result", "tool_use_id": "t2"},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be terse.", "cache_control": {"type": "ephemeral"}}]
    given = {"max_tokens": 3, "messages": messages, "system": system, "stop_sequences": ["x"], "tools": TOOLS}
    chat = MessagesRequest.model_validate(given).chat(may_think=False)
    function = {"name": "f", "arguments": json.dumps({"a": 1})}
    assert [
        {key: value for key, value in message.items() if value is not None} for message in chat.chat_messages()
    ] == [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "17"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "And?"},
    ]
    assert (chat.stop, chat.max_tokens, chat.calls.mode) == (["x"], 3, "auto")


def test_the_form_and_the_effort_of_an_answer(served: Served) -> None:
    schema = {"enum": ["true"]}
    output = {"effort": "none", "format": {"type": "json_schema", "schema": schema}}
    body = {"messages": TALK, "max_tokens": 9, "temperature": 0, "output_config": output}
    status, _, reply = served.send("POST", "/v1/messages", body, KEY)
    assert status == 200, reply
    assert [(block["type"], block["text"]) for block in reply["content"]] == [("text", '"true"')]


def test_what_claude_code_changes_with_each_request_is_no_prompt() -> None:
    def messages(*system: str) -> Any:
        blocks = [{"type": "text", "text": text} for text in system]
        given = {"max_tokens": 3, "messages": TALK, "system": blocks}
        return MessagesRequest.model_validate(given).chat(may_think=False).chat_messages()

    first = messages("x-anthropic-billing-header: cc_version=2; cch=1a2b3;", "Be terse.")
    assert first == messages("x-anthropic-billing-header: cc_version=2; cch=9f8e7;", "Be terse.")
    assert first == messages("Be terse.")
    assert messages("x-anthropic-billing-header: cch=1a2b3;") == messages()


def test_claude_code_may_search_its_tools() -> None:
    addition = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}
    found = [{"type": "tool_reference", "tool_name": name} for name in "fg"]
    messages: Any = [
        *TALK,
        {"role": "system", "content": [{"type": "text", "text": "News."}, addition]},
        {"role": "system", "content": [addition]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": found}]},
    ]
    tools = [{**tool, "defer_loading": True} for tool in TOOLS]
    given = {"max_tokens": 3, "messages": messages, "tools": tools}
    chat = MessagesRequest.model_validate(given).chat(may_think=False)
    told = [(message["role"], message["content"]) for message in chat.chat_messages()]
    assert told[len(TALK) :] == [("system", "News."), ("tool", "f\ng")]
    assert chat.calls.mode == "auto"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "image": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "of type 'image'"),
    "role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
    "server tool": ({"tools": [{"type": "web_search_1", "name": "web_search"}]}, "of type 'web_search_1'"),
    "no name": ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "without a name"),
    "choice": ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names 'g'"),
    "temperature": ({"temperature": -1}, "temperature is -1"),
    "budget": ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens is -5"),
    "empty stop": ({"stop_sequences": [""]}, "stop_sequences holds an empty string"),
    "stops": (
        {"stop_sequences": ["a"] * 65},
        "stop_sequences holds 65; at most 64 are allowed: send fewer, or raise max_stop_strings (--max-stop-strings)",
    ),
    "results": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}] * 16384}, *TALK]},
        "messages: List should have at most 16384 items",
    ),
    "none": ({"messages": []}, "messages is empty"),
    "schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}},
        "output_config: at '/', type is 1",
    ),
    "format": ({"output_config": {"format": {"type": "text", "schema": {}}}}, "output_config.format.type: "),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_supported_is_refused_in_one_line(served: Served, name: str, stream: bool) -> None:
    given, message = REFUSED[name]
    body = {"model": "tiny", "max_tokens": 2, "messages": TALK, "stream": stream, **given}
    status, _, reply = served.send("POST", "/v1/messages", body, KEY)
    assert (status, reply["type"], reply["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in reply["error"]["message"]
    assert "\n" not in reply["error"]["message"]


@pytest.mark.long
def test_keys_are_those_of_the_server(served: Served) -> None:
    for headers, expected in ((KEY, 400), ({"x-api-key": "wrong"}, 401), ({}, 401), ({"x-api-key": ""}, 401)):
        assert served.send("POST", "/v1/messages", {"messages": TALK}, headers)[0] == expected
