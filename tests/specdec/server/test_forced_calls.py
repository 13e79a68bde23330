"""Forced tool calls over HTTP: chat completions and responses, streamed and whole, in every form of calls."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import validate
from openai import BadRequestError, OpenAI

from specdec import SamplingParams
from specdec.core.call_forms import CallForm
from specdec.core.call_grammar import forced_calls
from specdec.core.tool_choice import Function, ToolChoice
from specdec.openai.chat_request import ChatRequest
from specdec.openai.responses_request import ResponsesRequest
from specdec.tool_calls.tool_parsers import parser_for
from tests.specdec.server.running import Served

pytestmark = pytest.mark.slow

TALK: list[Any] = [{"role": "user", "content": "A taxi to Davis, and a room."}]
SCHEMAS: dict[str, dict[str, Any]] = {
    "taxi": {
        "type": "object",
        "properties": {"to": {"type": "string", "maxLength": 5}, "hour": {"type": "integer", "minimum": 0}},
        "required": ["to"],
        "additionalProperties": False,
    },
    "room": {"type": "object", "properties": {"beds": {"enum": [1, 2]}}, "required": ["beds"]},
    "now": {"type": "object", "properties": {}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
TAXI: Any = {"type": "function", "function": {"name": "taxi"}}
ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [TAXI, {"type": "function", "function": {"name": "now"}}]},
}
FORMS = ["none", "hermes", "llama3_json"]
Call = tuple[str, str]


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def calling(engine: Served, form: str) -> Iterator[Served]:
    # Calls that the model need not choose need no setting.
    with engine.again(served_model_name=["tiny"], tool_call_parser=form, enable_auto_tool_choice=False) as served:
        yield served


@pytest.fixture
def caller(calling: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
        client._strict_response_validation = True
        yield client


def checked(calls: list[Call], allowed: tuple[str, ...] = tuple(SCHEMAS)) -> list[Call]:
    for name, arguments in calls:
        assert name in allowed
        validate(json.loads(arguments), SCHEMAS[name])
    return calls


def streamed(parts: Any) -> tuple[list[Call], str]:
    """Calls put together of their deltas, and the finish reason."""
    found: list[Call] = []
    reason = ""
    for part in parts:
        (choice,) = part.choices
        assert not choice.delta.content
        for delta in choice.delta.tool_calls or ():
            if delta.id:
                # The id and the name come first, with no argument yet.
                assert (delta.index, delta.type, delta.function.arguments) == (len(found), "function", "")
                found.append((delta.function.name, ""))
            else:
                assert delta.index == len(found) - 1
                assert delta.function.name is None
                name, before = found[-1]
                found[-1] = (name, before + delta.function.arguments)
        reason = choice.finish_reason or reason
    return found, reason


def ask(client: OpenAI, choice: Any, seed: int, **more: Any) -> tuple[list[Call], str]:
    """The calls of an answer, whole and streamed, and its finish reason."""
    given: dict[str, Any] = {"model": "tiny", "messages": TALK, "tools": TOOLS, "tool_choice": choice, "seed": seed}
    given |= more
    (answer,) = client.chat.completions.create(**given).choices
    assert answer.message.content is None
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()]
    assert streamed(client.chat.completions.create(stream=True, **given)) == (calls, answer.finish_reason)
    return calls, answer.finish_reason


@pytest.mark.long
def test_required_calls_are_valid_and_those_of_the_offline_api(calling: Served, caller: OpenAI, form: str) -> None:
    known: CallForm | None = parser_for(form, "").FORM
    structure = forced_calls(
        ToolChoice("required"), [Function(*each) for each in SCHEMAS.items()], known, {}, is_single=False
    )
    counts, names = set(), set()
    for seed in range(4):
        calls, reason = ask(caller, "required", seed)
        assert reason == "tool_calls"
        assert checked(calls)
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=None, structured_outputs=structure)
        text = calling.offline.chat(TALK, params, use_tqdm=False)[0].text
        assert all(arguments in text for _, arguments in calls)
        counts.add(len(calls))
        names |= {name for name, _ in calls}
    assert len(names) > 1
    assert max(counts) > 1


def test_a_named_function_is_called_once(caller: OpenAI) -> None:
    for seed in range(2):
        calls, reason = ask(caller, TAXI, seed)
        # As in OpenAI's API and vLLM.
        assert reason == "stop"
        assert len(checked(calls, ("taxi",))) == 1


def test_one_call_alone_and_of_allowed_tools(caller: OpenAI) -> None:
    found = [ask(caller, ALLOWED, seed, parallel_tool_calls=False) for seed in range(4)]
    for calls, reason in found:
        assert reason == "tool_calls"
        assert len(checked(calls, ("taxi", "now"))) == 1


def test_every_sample_has_calls(caller: OpenAI) -> None:
    reply = caller.chat.completions.create(
        model="tiny", messages=TALK, tools=TOOLS, tool_choice="required", n=3, seed=5
    )
    found = [[call.id for call in choice.message.tool_calls or ()] for choice in reply.choices]
    assert all(found)
    assert len({one for each in found for one in each}) == sum(map(len, found))


def client_tokens(client: OpenAI, given: dict[str, Any]) -> list[int]:
    (choice,) = client.chat.completions.create(**given, extra_body={"return_token_ids": True}).choices
    return list((choice.model_extra or {})["token_ids"])


def test_a_call_that_is_cut_off_has_the_reason(caller: OpenAI, form: str) -> None:
    given: Any = {"model": "tiny", "messages": TALK, "tools": TOOLS, "tool_choice": TAXI, "seed": 1}
    (whole,) = caller.chat.completions.create(**given).choices
    # Without what closes the call, each a token, and the last characters of the arguments.
    behind = {"none": "", "hermes": "}\n</tool_call>", "llama3_json": "}"}[form]
    count = len(client_tokens(caller, given)) - len(behind) - 3
    (answer,) = caller.chat.completions.create(max_tokens=count, **given).choices
    call, complete = (choice.message.tool_calls[0].function for choice in (answer, whole))  # type: ignore[index,union-attr]
    assert answer.finish_reason == "length"
    assert call.name == "taxi"
    assert call.arguments
    assert complete.arguments.startswith(call.arguments)
    assert call.arguments != complete.arguments
    (short,) = caller.chat.completions.create(max_tokens=2, **given).choices
    assert short.finish_reason == "length"


def test_calls_take_the_place_of_a_message_with_a_format(caller: OpenAI) -> None:
    """An answer that is calls has no message for `response_format` to concern; agents send both."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    assert ask(caller, TAXI, 3, response_format=form) == ask(caller, TAXI, 3)


RESPONSE_TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in SCHEMAS.items()
]
RESPONSE_CHOICES: list[tuple[Any, tuple[str, ...]]] = [
    ("required", tuple(SCHEMAS)),
    ({"type": "function", "name": "room"}, ("room",)),
    (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
        ("now",),
    ),
]


@pytest.mark.parametrize(("choice", "allowed"), RESPONSE_CHOICES, ids=["required", "named", "allowed"])
def test_responses_are_forced_calls(caller: OpenAI, choice: Any, allowed: tuple[str, ...]) -> None:
    given: dict[str, Any] = {"model": "tiny", "input": "Go.", "tools": RESPONSE_TOOLS, "tool_choice": choice}
    reply = caller.responses.create(**given, extra_body={"seed": 2})
    assert reply.status == "completed"
    assert {item.type for item in reply.output} == {"function_call"}
    calls = [(item.name, item.arguments) for item in reply.output if item.type == "function_call"]
    assert checked(calls, allowed)
    echoed = reply.tool_choice if isinstance(reply.tool_choice, str) else reply.tool_choice.model_dump()
    assert echoed == choice
    events = list(caller.responses.create(stream=True, **given, extra_body={"seed": 2}))
    last = events[-1]
    assert last.type == "response.completed"
    assert [(i.name, i.arguments) for i in last.response.output if i.type == "function_call"] == calls
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert deltas == "".join(arguments for _, arguments in calls)


def test_a_client_that_leaves_ends_a_forced_call(calling: Served, caller: OpenAI) -> None:
    endless: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    stream: Any = caller.chat.completions.create(
        model="tiny", messages=TALK, tools=endless, tool_choice="required", stream=True
    )
    next(iter(stream))
    stream.close()
    calling.wait_until_idle()


def tool(parameters: Any, name: Any = "taxi") -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}]}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no tools": ({"tool_choice": "required"}, "tool_choice", "the request offers no function; give at least one"),
    "another value": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "it must be 'none', 'auto', 'required'"),
    "unknown name": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "bus"}}},
        "tool_choice",
        "tool_choice names 'bus', which is not in tools; name one that is",
    ),
    "keyword": (
        {**tool({"type": "object", "properties": {"a": {"not": {}}}}), "tool_choice": "required"},
        "tools",
        "tools: the parameters of 'taxi' cannot be followed as an object: at '/properties/a', 'not' is not supported",
    ),
    # Before a grammar is made of it.
    "large": (
        {**tool({"type": "object", "properties": {"a": {"enum": ["b" * (1 << 18)]}}}), "tool_choice": "required"},
        "tools",
        "tools has 262203 bytes, more than structured_max_bytes, 262144; make it smaller",
    ),
    "no object": ({**tool({"type": "string"}), "tool_choice": TAXI}, "tools", "'taxi' cannot be followed as an object"),
    "no schema": ({**tool([1]), "tool_choice": TAXI}, "tools", "parameters of 'taxi' are [1]; they must be a JSON"),
    "no name": ({**tool({}, ""), "tool_choice": "required"}, "tools", "tools holds the name ''; give each function"),
    "two forms": (
        {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "structured_outputs and a tool_choice that forces calls exclude each other; leave one out",
    ),
    # The model does not choose here: the server's setting.
    "auto": ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice", "needs --enable-auto-tool-choice"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_impossible_tool_choices_are_refused_by_name(caller: OpenAI, name: str, stream: bool) -> None:
    given, field, message = REFUSED[name]
    with pytest.raises(BadRequestError, match=re.escape(message)) as caught:
        caller.chat.completions.create(model="tiny", messages=TALK, stream=stream, extra_body=given)
    assert caught.value.param == field
    assert "\n" not in caught.value.message


def test_responses_refuse_by_name(caller: OpenAI) -> None:
    wrong: Any = [{"type": "function", "name": "taxi", "parameters": {"type": "array"}}]
    for given, field in (
        ({"tools": wrong, "tool_choice": "required"}, "tools"),
        ({"tools": wrong, "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(BadRequestError) as caught:
            caller.responses.create(model="tiny", input="a", extra_body=given)
        assert caught.value.param == field


def test_the_template_shows_what_the_model_may_choose_from() -> None:
    """Among allowed tools that it chooses from, no others; where the grammar forces calls, all, as other prompts do."""
    auto: Any = {**ALLOWED, "allowed_tools": {**ALLOWED["allowed_tools"], "mode": "auto"}}
    for choice, count in ((None, 3), ("none", 0), ("required", 3), (TAXI, 3), (ALLOWED, 3), (auto, 2)):
        chat = ChatRequest.model_validate({"messages": TALK, "tools": TOOLS, "tool_choice": choice})
        response = ResponsesRequest.model_validate({"input": "a", "tools": RESPONSE_TOOLS, "tool_choice": choice})
        shown = chat.template_arguments().get("tools", [])
        assert [tool["function"]["name"] for tool in shown] == list(SCHEMAS)[: 1 if choice is auto else count] + (
            ["now"] if choice is auto else []
        )
        names = [tool["function"]["name"] for tool in response.template_arguments().get("tools", [])]
        assert names == [tool["function"]["name"] for tool in shown]
