"""Tool calls: tools reach the chat template, and calls in the text of an answer are found, however it is cut."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from specdec.core.outputs import CompletionOutput, RequestOutput
from specdec.core.sampling_params import SamplingParams
from specdec.models.tokenizer import Tokenizer
from specdec.openai.chat_answer import ChatAnswer
from specdec.openai.chat_request import ChatRequest
from specdec.openai.replies import FunctionCall
from specdec.openai.responses_answer import OutputCall, ResponsesAnswer
from specdec.openai.responses_request import ResponsesRequest
from specdec.openai.served_model import ServedModel
from specdec.text.segment import Segment
from specdec.tool_calls.tagged_calls import HermesParser, LlamaParser, ToolParser
from specdec.tool_calls.tool_call_reader import CallArguments, CallStart
from specdec.tool_calls.tool_parsers import PlainText, parser_for
from tests.fakes import edit_json
from tests.profiles import num_cases
from tests.specdec.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.slow

TAXI = '{"name": "taxi", "arguments": {"to": "Davis", "at": {"h": 9}}}'
ROOM = '{"name": "room", "arguments": {}}'
TAXI_CALL = FunctionCall("taxi", '{"to": "Davis", "at": {"h": 9}}')
ROOM_CALL = FunctionCall("room", "{}")
OPEN, CLOSE = HermesParser.OPEN, HermesParser.CLOSE
Found = str | FunctionCall
MARKS = f'{{"a": "}}{CLOSE}\\""}}'
HERMES: list[tuple[str, list[Found]]] = [
    ("", []),
    ("plain text", ["plain text"]),
    ("a < b and <tool> too", ["a < b and <tool> too"]),
    (f"{OPEN}\n{TAXI}\n{CLOSE}", [TAXI_CALL]),
    (f"Well.\n{OPEN}{TAXI}{CLOSE}\n{OPEN}{ROOM}{CLOSE}\n", ["Well.", TAXI_CALL, ROOM_CALL]),
    (f"{OPEN}{TAXI}{CLOSE} done", [TAXI_CALL, " done"]),
    (f"{OPEN}no JSON{CLOSE}", [f"{OPEN}no JSON{CLOSE}"]),
    (f"{OPEN}[1]{CLOSE}", [f"{OPEN}[1]{CLOSE}"]),
    (f"{OPEN}{TAXI}", [TAXI_CALL]),
    # JSON has no line ends and tabs in its texts; they would cost a client all of the call.
    (
        f'{OPEN}{{"name": "f", "arguments": {{"a":\n"b\nc\td\\\n"}}}}{CLOSE}',
        [FunctionCall("f", '{"a":\n"b\\nc\\td\\n"}')],
    ),
    # The keys in another order, marks inside of a string, an object that is not closed, and an end in the arguments.
    (f'{OPEN}{{"arguments": {{"a": 1}}, "name": "f"}}{CLOSE}', [FunctionCall("f", '{"a": 1}')]),
    (f'{OPEN}{{"name": "f", "arguments": {MARKS}}}{CLOSE}', [FunctionCall("f", MARKS)]),
    (f'{OPEN}{{"name": "f", "arguments": {{"a": [1]{CLOSE} so', [FunctionCall("f", '{"a": [1]'), " so"]),
    (f'{OPEN}{{"name": "f", "arguments": {{"a": "b', [FunctionCall("f", '{"a": "b')]),
    (f'{OPEN}{{"name": "f", "arguments": {{}}, "id": {{"x": 1}}}}{CLOSE}', [FunctionCall("f", "{}")]),
    (f'{OPEN}{{"name": "taxi", "argu', [f'{OPEN}{{"name": "taxi", "argu']),
    ("ends in <tool_", ["ends in <tool_"]),
    # Calls that are not closed, and what follows them.
    (f"{OPEN}{TAXI}\nDone.", [TAXI_CALL, "\nDone."]),
    (f"{OPEN}{TAXI}{OPEN}{ROOM}{CLOSE}", [TAXI_CALL, ROOM_CALL]),
    (f"{OPEN}{TAXI} so{CLOSE}!", [TAXI_CALL, " so!"]),
    (f'{OPEN}{{"name": "f", "arguments": {{}}\nDone.', [FunctionCall("f", "{}"), "\nDone."]),
    (f'{OPEN}{{"name": "f", "arguments": {{}}, "id": 1 and so', [FunctionCall("f", "{}"), ', "id": 1 and so']),
    # Several objects between two tags.
    (f"{OPEN}{TAXI}\n{ROOM}{CLOSE} done", [TAXI_CALL, ROOM_CALL, " done"]),
    (f"{OPEN}{TAXI},{ROOM}{CLOSE}", [TAXI_CALL, ROOM_CALL]),
    (f'{OPEN}{{"a": 1}}\n{ROOM}{CLOSE}', [f'{OPEN}{{"a": 1}}', ROOM_CALL]),
    (f'{OPEN}{ROOM} {{"a": 1}}{CLOSE}', [ROOM_CALL, '{"a": 1}']),
    # Tags in prose, and white space around what is no call.
    (f"The {OPEN} tag: {OPEN}{ROOM}{CLOSE}", [f"The {OPEN} tag:", ROOM_CALL]),
    (f"So {OPEN} and {CLOSE}, {OPEN}\n", [f"So {OPEN} and {CLOSE}, {OPEN}\n"]),
    (f"As {OPEN}{{ }}{CLOSE} {OPEN}{ROOM}{CLOSE}", [f"As {OPEN}{{ }}{CLOSE}", ROOM_CALL]),
    (f'{OPEN}{{"name: {OPEN}{ROOM}{CLOSE}', [f'{OPEN}{{"name:', ROOM_CALL]),
    (f'{OPEN}{{"name": "f\n{OPEN}{ROOM}{CLOSE}', [f'{OPEN}{{"name": "f', ROOM_CALL]),
    # Other forms of arguments.
    (f'{OPEN}{{"name": "f"}}{CLOSE}', [FunctionCall("f", "{}")]),
    (f'{OPEN}{{"name": "f", "arguments": null}}{CLOSE}', [FunctionCall("f", "{}")]),
    (f'{OPEN}{{"name": "f", "arguments": ""}}{CLOSE}', [FunctionCall("f", "{}")]),
    (f'{OPEN}{{"name": "f", "arguments": "{{\\"a\\": 1}}"}}{CLOSE}', [FunctionCall("f", '{"a": 1}')]),
    (f'{OPEN}{{"name": "f", "arguments": "Davis"}}{CLOSE}', [f'{OPEN}{{"name": "f", "arguments": "Davis"}}{CLOSE}']),
    (f'{OPEN}{{"name": "", "arguments": {{}}}}{CLOSE}', [f'{OPEN}{{"name": "", "arguments": {{}}}}{CLOSE}']),
    # Halves of surrogate pairs have no UTF-8 form.
    (f'{OPEN}{{"name": "\\ud800", "arguments": {{}}}}', [f'{OPEN}{{"name": "\\ud800", "arguments": {{}}}}']),
    (f'{OPEN}{{"arguments": {{"a": "\\ud800"}}, "name": "f"}}', [FunctionCall("f", '{"a": "\\ud800"}')]),
]
LLAMA_TAXI = TAXI.replace("arguments", "parameters")
LLAMA: list[tuple[str, list[Found]]] = [
    ("", []),
    ("plain text {", ["plain text {"]),
    (LLAMA_TAXI, [TAXI_CALL]),
    (f"<|python_tag|>{LLAMA_TAXI}; {ROOM}\n", [TAXI_CALL, ROOM_CALL]),
    (f'{{"parameters": {{"a": 1}}, "name": "f"}};{ROOM}', [FunctionCall("f", '{"a": 1}'), ROOM_CALL]),
    ('{"answer": 42}', ['{"answer": 42}']),
    ('{"answer": 42} or so', ['{"answer": 42} or so']),
    ('{"name": "taxi", "para', ['{"name": "taxi", "para']),
    ("{ this is text }", ["{ this is text }"]),
    ("<|python", ["<|python"]),
    ('{"type": "function", "name": "f", "parameters": null}', [FunctionCall("f", "{}")]),
    ('{"name": "f"}', [FunctionCall("f", "{}")]),
    # An answer in JSON, not a call of a function that is not offered.
    ('{"name": "Ann"}', ['{"name": "Ann"}']),
    ('{"name": "Davis", "type": "city"}', ['{"name": "Davis", "type": "city"}']),
    (f'{LLAMA_TAXI}; {{"name": "Ann"}}', [TAXI_CALL, '{"name": "Ann"}']),
    ('{"name": "g", "parameters": {}}', [FunctionCall("g", "{}")]),
    ('{"name": "Ann", "age": 5}', ['{"name": "Ann", "age": 5}']),
    (f"Well.\n<|python_tag|>{LLAMA_TAXI}", ["Well.", TAXI_CALL]),
    (f"The <|python_tag|> tag: <|python_tag|>{ROOM}; ", ["The <|python_tag|> tag:", ROOM_CALL]),
    (f"{LLAMA_TAXI}; <|python_tag|>{ROOM} so; it is", [TAXI_CALL, ROOM_CALL, " so; it is"]),
    ("  so\n", ["  so\n"]),
]
CASES = [(HermesParser, *case) for case in HERMES] + [(LlamaParser, *case) for case in LLAMA]


def parse(parser: ToolParser, pieces: Sequence[str]) -> list[Found]:
    """Texts and calls, each put together of its pieces."""
    items = [item for piece in pieces for item in parser.push(piece)] + parser.finish()
    joined: list[Found] = []
    for item in items:
        last = joined[-1] if joined else None
        if isinstance(item, CallStart):
            joined.append(FunctionCall(item.name, ""))
        elif isinstance(item, CallArguments):
            assert isinstance(last, FunctionCall)
            last.arguments += item.text
        elif isinstance(last, str):
            joined[-1] = last + item
        else:
            joined.append(item)
    return joined


@pytest.mark.parametrize(("kind", "text", "items"), CASES)
@given(cuts=st.sets(st.integers(0, 200)))
def test_calls_are_found_in_pieces_of_any_size(
    kind: type[ToolParser], text: str, items: list[Found], cuts: set[int]
) -> None:
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    pieces = [text[first:last] for first, last in itertools.pairwise(places)]
    functions = [{"name": "f"}, {"name": "taxi"}]
    assert parse(kind(functions), pieces) == items
    assert parse(kind(functions), list(text)) == items


FRAGMENTS = (
    *(OPEN, CLOSE, "<|python_tag|>", "<tool_", "</tool_", "<|py", TAXI, ROOM, LLAMA_TAXI, '{"name": "f"}'),
    *(" ", "\n", "; ", ",", "{", "}", '"', "\\", "<", "[1]", "so", '{"a": 1}', '"name"', ": ", '{"name": "f"'),
    '{"name": "f", "arguments": null}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": {',
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)


@pytest.mark.long
@settings(max_examples=num_cases(400))
@given(kind=st.sampled_from([HermesParser, LlamaParser]), text=TEXTS, cuts=st.sets(st.integers(0, 300)))
def test_pieces_add_up_to_the_whole_answer(kind: type[ToolParser], text: str, cuts: set[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    whole = parse(kind(), [text])
    assert parse(kind(), [text[first:last] for first, last in itertools.pairwise(places)]) == whole
    assert parse(kind(), list(text)) == whole
    if not any(isinstance(item, FunctionCall) for item in whole):
        assert "".join(map(str, whole)) == text


PROSE = ("Well", f"use the {OPEN} tag", f"{OPEN} {{}} is empty", "a < b", 'say "{"', f"as `{OPEN}`", "<tool")
FORMS = {
    '{"name": "f", "arguments": {"a": 1}}': '{"a": 1}',
    '{"arguments": {"a": 1}, "name": "f"}': '{"a": 1}',
    '{"name": "f"}': "{}",
    '{"name": "f", "arguments": null}': "{}",
    '{"name": "f", "arguments": "{\\"a\\": 1}"}': '{"a": 1}',
}
CALLS = st.tuples(st.lists(st.sampled_from(list(FORMS)), min_size=1, max_size=3), st.booleans())


@given(st.lists(st.sampled_from(PROSE) | CALLS, max_size=6))
def test_every_call_and_all_prose_is_found(parts: list[Any]) -> None:
    """Several calls behind one tag, closed or not, between prose that speaks of tags."""
    text, expected, prose = "", list[Found](), ""
    for part in parts:
        if isinstance(part, str):
            text, prose = f"{text}\n{part}.\n", prose + part + "."
        else:
            objects, is_closed = part
            text += OPEN + "\n".join(objects) + (CLOSE if is_closed else "")
            expected += [FunctionCall("f", FORMS[each]) for each in objects]
    items = parse(HermesParser(), [text])
    assert [item for item in items if isinstance(item, FunctionCall)] == expected
    found = "".join(item for item in items if isinstance(item, str))
    assert "".join(found.split()) == "".join(prose.split())


def test_text_is_not_held_back_longer_than_it_must() -> None:
    parser = HermesParser()
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" <") == []
    assert parser.push("b>") == [" <b>"]
    assert LlamaParser().push("Hello") == ["Hello"]


def test_the_form_is_recognised_in_the_chat_template() -> None:
    assert parser_for("auto", f"{{{{ '{OPEN}' }}}}") is HermesParser
    assert parser_for("auto", 'respond with {"name": f, "parameters": p}') is LlamaParser
    assert parser_for("auto", "{{ messages }}") is PlainText
    assert parser_for("none", OPEN) is PlainText
    assert parser_for("llama3_json", OPEN) is LlamaParser


TOOLS = [{"type": "function", "function": {"name": "taxi", "parameters": {"type": "object"}}}]
TEXT = f"Well.\n{OPEN}{TAXI}{CLOSE}\n{OPEN}{ROOM}{CLOSE}"
PIECES = ["We", "ll.\n<tool", f"_call>{TAXI[:35]}", f"{TAXI[35:]}</", f"tool_call>\n{OPEN}{ROOM}", CLOSE]


async def _states() -> AsyncGenerator[tuple[int, RequestOutput]]:
    """States of a request that generates `PIECES`."""
    for count in range(1, len(PIECES) + 1):
        text, ends = "".join(PIECES[:count]), count == len(PIECES)
        tokens = list(range(count))
        segments = [Segment(PIECES[count - 1], False)]
        output = CompletionOutput(0, text, tokens, [False] * count, "stop" if ends else None, segments=segments)
        yield 0, RequestOutput("r", None, [1, 2], [output], ends)


def _events(stream: AsyncGenerator[bytes]) -> list[Any]:
    """The bodies of all events but [DONE]."""

    async def read() -> bytes:
        return b"".join([part async for part in stream])

    lines = asyncio.run(read()).decode().splitlines()
    bodies = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(body) for body in bodies if body != "[DONE]"]


async def _last() -> list[RequestOutput]:
    return [state async for _, state in _states()][-1:]


SERVED = ServedModel(["tiny"], None, HermesParser, None, "none", 0)


def _chat(**more: Any) -> ChatAnswer:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **more}
    return ChatAnswer("chatcmpl-1", SERVED, ChatRequest.model_validate(body), SamplingParams())


def test_calls_of_a_whole_chat_answer() -> None:
    reply = json.loads(msgspec.json.encode(_chat().whole(asyncio.run(_last()))))
    (choice,) = ChatCompletion.model_validate(reply).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    calls: Any = choice.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        (TAXI_CALL.name, TAXI_CALL.arguments),
        (ROOM_CALL.name, ROOM_CALL.arguments),
    ]
    assert len({call.id for call in calls}) == 2
    assert all("index" not in call for call in reply["choices"][0]["message"]["tool_calls"])


def test_calls_of_a_streamed_chat_answer() -> None:
    chunks = [ChatCompletionChunk.model_validate(body) for body in _events(_chat(stream=True).events(_states()))]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Well."
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    # The name comes first, with the call's id, and then the arguments as they are generated.
    assert [(piece.index, piece.function and piece.function.name) for piece in pieces if piece.id] == [
        (0, "taxi"),
        (1, "room"),
    ]
    arguments = [[str(p.function.arguments) for p in pieces if p.index == index and p.function] for index in (0, 1)]
    assert ["".join(each) for each in arguments] == [TAXI_CALL.arguments, "{}"]
    assert len(arguments[0]) >= 3
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_only_the_first_call_is_returned_where_parallel_calls_are_not_wanted() -> None:
    more: dict[str, Any] = {"parallel_tool_calls": False}
    (choice,) = _chat(**more).whole(asyncio.run(_last())).choices
    assert choice.finish_reason == "tool_calls"
    assert isinstance(choice.message.tool_calls, list)
    assert [call.function for call in choice.message.tool_calls] == [TAXI_CALL]
    deltas = [body["choices"][0]["delta"] for body in _events(_chat(stream=True, **more).events(_states()))]
    pieces = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert {piece["index"] for piece in pieces} == {0}
    assert "".join(piece["function"]["arguments"] for piece in pieces) == TAXI_CALL.arguments
    tool = {"type": "function", "name": "taxi", "parameters": {"type": "object"}}
    body = ResponsesRequest.model_validate({"input": "a", "tools": [tool], **more})
    reply = ResponsesAnswer("resp-1", SERVED, body, SamplingParams()).whole(asyncio.run(_last()))
    assert [item.name for item in reply.output if isinstance(item, OutputCall)] == ["taxi"]
    assert reply.parallel_tool_calls is False


def test_without_tools_the_text_stays_as_it_is() -> None:
    for more in ({"tools": None}, {"tool_choice": "none"}):
        reply = _chat(**more).whole(asyncio.run(_last()))
        assert reply.choices[0].message.content == TEXT
        assert reply.choices[0].finish_reason == "stop"


def test_calls_of_a_response() -> None:
    tool = {"type": "function", "name": "taxi", "parameters": {"type": "object"}}
    body = ResponsesRequest.model_validate({"input": "a", "tools": [tool]})

    def answer() -> ResponsesAnswer:
        return ResponsesAnswer("resp-1", SERVED, body, SamplingParams())

    whole = Response.model_validate_json(msgspec.json.encode(answer().whole(asyncio.run(_last()))))
    events = _events(answer().events(_states()))
    streamed = Response.model_validate(events[-1]["response"])
    for reply in (whole, streamed):
        first, *calls = reply.output
        assert first.type == "message"
        assert reply.output_text == "Well."
        found = [(call.type, call.name, call.arguments, call.status) for call in calls if call.type == "function_call"]
        assert found == [
            ("function_call", TAXI_CALL.name, TAXI_CALL.arguments, "completed"),
            ("function_call", ROOM_CALL.name, ROOM_CALL.arguments, "completed"),
        ]
    kinds = [event["type"].removeprefix("response.") for event in events]
    delta = "function_call_arguments.delta"
    ends = ["function_call_arguments.done", "output_item.done"]
    assert kinds[-10:-5] == ["output_item.added", delta, delta, *ends]
    assert kinds[-5:] == ["output_item.added", delta, *ends, "completed"]


def test_the_template_gets_tools_and_calls(tmp_path: Any) -> None:
    folder = save_tiny(tmp_path).target
    template = (
        "{{ tools[0].function.name }}|{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.to }}{% endfor %}|{% endfor %}{{ extra }}"
    )
    if (folder / "chat_template.jinja").exists():
        (folder / "chat_template.jinja").write_text(template)
    else:
        edit_json(folder / "tokenizer_config.json", chat_template=template)
    call = {"id": "1", "type": "function", "function": {"name": "taxi", "arguments": '{"to": "Davis"}'}}
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
    ]
    body = ChatRequest.model_validate({"messages": messages, "tools": TOOLS, "chat_template_kwargs": {"extra": "more"}})
    tokenizer = Tokenizer(folder)
    arguments = body.template_arguments()
    tokens = tokenizer.encode_chat(tokenizer.chat_messages(body.chat_messages(), **arguments), **arguments)
    assert tokenizer.decode(tokens) == "taxi|user:Go|assistant:Davis|tool:ok|more"
