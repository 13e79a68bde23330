"""Tool calls whose tags are special tokens of the tokenizer."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from specdec import LLM
from specdec.async_engine.async_llm import AsyncLLM
from tests.specdec.metaspace_llama import CALL, byte_ids, ids, save_chain
from tests.specdec.server.running import Served, engine_in_thread

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"dtype": "float64", "kv_cache_memory": 8 << 20}
# The conversation ends with "assistant".
CHAIN = [*byte_ids("t"), *ids("▁hello", "<think>", "<tool_call>", CALL, "</tool_call>", "<|im_end|>", "</s>")]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TOOLS_OF_NONE = [{"type": "function", "function": {"name": "f"}}]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tools") / "target"
    save_chain(folder, CHAIN, max_position_embeddings=1024)
    with (
        engine_in_thread(AsyncLLM(folder, None, **SETTINGS), LLM(folder, None, **SETTINGS)) as engine,
        engine.again(enable_auto_tool_choice=True, tool_call_parser="hermes") as served,
    ):
        yield served


def events(reply: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.decode().splitlines()]
    return [msgspec.json.decode(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_in_special_tags_is_a_call(served: Served, stream: bool) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 20, "stream": stream}
    status, _, reply = served.send("POST", "/v1/chat/completions", body)
    assert status == 200, reply
    choices = [choice for part in (events(reply) if stream else [reply]) for choice in part["choices"]]
    said = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    text = "".join(part.get("content") or "" for part in said)
    calls = [call["function"] for part in said for call in part.get("tool_calls") or []]
    # Special tokens that are no tags are left out.
    assert text.strip() == "hello"
    assert [call["name"] for call in calls if call.get("name")] == ["f"]
    assert json.loads("".join(call["arguments"] for call in calls)) == {"a": 1}
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_a_call_of_a_response(served: Served) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    status, _, reply = served.send("POST", "/v1/responses", {"input": "hello", "tools": tools, "temperature": 0})
    assert status == 200, reply
    (call,) = [item for item in reply["output"] if item["type"] == "function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": 1})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_forced_calls_have_the_special_tokens(served: Served, stream: bool) -> None:
    """The model was trained to write these, and could spell the tags besides."""
    body = {"messages": MESSAGES, "tools": TOOLS_OF_NONE, "tool_choice": "required", "temperature": 0}
    body |= {"parallel_tool_calls": False, "return_token_ids": True, "stream": stream}
    status, _, reply = served.send("POST", "/v1/chat/completions", body)
    assert status == 200, reply
    choices = [choice for part in (events(reply) if stream else [reply]) for choice in part["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    opening, closing, end = ids("<tool_call>", "</tool_call>", "</s>")
    assert (tokens[0], tokens[-2:]) == (opening, [closing, end])
    said = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    assert not any(part.get("content") for part in said)
    calls = [call["function"] for part in said for call in part.get("tool_calls") or []]
    assert "".join(call.get("name") or "" for call in calls) == "f"
    assert "".join(call["arguments"] for call in calls) == "{}"
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_tags_are_left_out_where_there_are_no_tools(served: Served, more: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20, **more}
    _, _, reply = served.send("POST", "/v1/chat/completions", body)
    assert reply["choices"][0]["message"]["content"] == " hello" + CALL.replace("▁", " ")


@pytest.mark.long
def test_a_request_may_keep_all_special_tokens(served: Served) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20, "skip_special_tokens": False}
    _, _, reply = served.send("POST", "/v1/chat/completions", body)
    call = CALL.replace("▁", " ")
    assert reply["choices"][0]["message"]["content"] == f" hello<think><tool_call>{call}</tool_call><|im_end|>"
