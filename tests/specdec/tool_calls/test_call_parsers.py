"""Tool calls in Python's form, in tags of their own and in Mistral's forms, however the text is cut into pieces."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.call_forms import form_name
from specdec.tool_calls import pythonic_calls
from specdec.tool_calls.mistral_calls import MistralParser
from specdec.tool_calls.pythonic_calls import PythonicParser
from specdec.tool_calls.tagged_calls import ToolParser
from specdec.tool_calls.tool_call_reader import CallArguments, CallStart
from specdec.tool_calls.tool_parsers import PARSERS, parser_for
from specdec.tool_calls.xml_calls import Qwen3CoderParser

# Text, and calls with their arguments.
Found = list[str | tuple[str, Any]]
PYTHONIC: dict[str, Found] = {
    '[taxi(to="Davis", hour=9), now()]': [("taxi", {"to": "Davis", "hour": 9}), ("now", {})],
    ' [ a.b(x=[1, -2.5, (True, null)], y={"k": None, "t": false}) ]\n': [
        ("a.b", {"x": [1, -2.5, [True, None]], "y": {"k": None, "t": False}})
    ],
    "[f(s='it\\'s )]', t=\"a[(\")]": [("f", {"s": "it's )]", "t": "a[("})],
    "[f()] and so": [("f", {}), " and so"],
    "[f(a=-5, b=+3, c=+.5)]": [("f", {"a": -5, "b": 3, "c": 0.5})],
    "[f(a=1e999)]": ["[f(a=1e999)]"],
    # Text that is no list of calls, values that are none of JSON, and what is cut off.
    "Plain [f()] text": ["Plain [f()] text"],
    "[1, 2]": ["[1, 2]"],
    "[f]": ["[f]"],
    "[": ["["],
    "": [],
    "[f(1)]": ["[f(1)]"],
    "[f(a={1})]": ["[f(a={1})]"],
    "[f(**a)]": ["[f(**a)]"],
    "[f(a=__import__('os'))]": ["[f(a=__import__('os'))]"],
    '[f(a="b': ['[f(a="b'],
    "[f(a=1), g(b": [("f", {"a": 1}), ", g(b"],
    "[f(a=1), then [text]": [("f", {"a": 1}), ", then [text]"],
    "[f(a" + "[" * 200: ["[f(a" + "[" * 200],
}
OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAXI = "<function=taxi>\n<parameter=to>\nDavis\n</parameter>\n<parameter=hour>\n9\n</parameter>\n</function>"
TAXI_CALL = ("taxi", {"to": "Davis", "hour": 9})
FUNCTIONS = [
    {
        "name": "taxi",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"type": "string"},
                "hour": {"type": "integer"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "list": {"type": ["array", "null"]},
                "far": {"type": "boolean"},
                "any": {},
            },
        },
    },
    {
        "name": "book",
        "parameters": {
            "$defs": {
                "Item": {"type": "object"},
                "Size": {"enum": ["1.0", "2.0"]},
                "Tree": {"properties": {"next": {"$ref": "#/$defs/Tree"}}},
                "Loop": {"$ref": "#/$defs/Loop"},
                "Nested": {"anyOf": [{"$ref": "#/$defs/Nested"}, {"type": "integer"}]},
                # More ways through them than can be walked.
                **{f"{n}": {"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(16)]} for n in range(15)},
                "15": {"type": "integer"},
            },
            "properties": {
                "item": {"$ref": "#/$defs/Item"},
                "maybe": {"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]},
                "size": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
                "gone": {"anyOf": [{"$ref": "#/$defs/Gone"}, {"type": "null"}]},
                "count": {"allOf": [{"$ref": "#/properties/one"}, {"description": "how many"}]},
                "one": {"const": 1},
                "some": {"enum": [1, 2.5, None]},
                "list": {"items": {"type": "integer"}},
                "tree": {"$ref": "#/$defs/Tree"},
                "loop": {"$ref": "#/$defs/Loop"},
                "nested": {"$ref": "#/$defs/Nested"},
                "many": {"$ref": "#/$defs/0"},
                "listed": {"$ref": "#/$defs/Nested/anyOf/1"},
                "beyond": {"$ref": "#/$defs/Nested/anyOf/2"},
            },
        },
    },
    {"name": "odd", "parameters": {"properties": [1]}},
    {"name": "odder", "parameters": {"properties": {"a": {"type": [{"b": 1}], "anyOf": 3}}}},
]


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>"


XML: dict[str, Found] = {
    f"{OPEN}\n{TAXI}\n{CLOSE}": [TAXI_CALL],
    f"I call.\n\n{OPEN}\n{TAXI}\n{CLOSE}\n{OPEN}\n<function=now>\n</function>\n{CLOSE}\n": [
        "I call.",
        TAXI_CALL,
        ("now", {}),
    ],
    # Without tags around it, and text behind.
    f"{TAXI} done": [TAXI_CALL, " done"],
    f"{OPEN}{TAXI}{CLOSE} done": [TAXI_CALL, " done"],
    # Values by their schemas; those without one are text.
    f"<function=taxi>{parameter('to', 'null')}{parameter('note', 'None')}{parameter('list', '[1, {}]')}</function>": [
        ("taxi", {"to": "null", "note": None, "list": [1, {}]})
    ],
    f"<function=taxi>{parameter('far', 'True')}{parameter('hour', 'soon')}{parameter('any', '1')}</function>": [
        ("taxi", {"far": True, "hour": "soon", "any": "1"})
    ],
    f"<function=other>{parameter('a', '1')}</function>": [("other", {"a": "1"})],
    f"<function=odd>{parameter('a', '1')}</function><function=odder>{parameter('a', '1')}</function>": [
        ("odd", {"a": "1"}),
        ("odder", {"a": "1"}),
    ],
    # Types that other schemas, values or keywords show, as in pydantic's nested models.
    "<function=book>"
    + "".join(parameter(key, '{"a": [1]}') for key in ("item", "maybe", "tree"))
    + parameter("count", "3")
    + parameter("some", "2.5")
    + parameter("list", "[1, 2]")
    + "</function>": [
        ("book", {"item": {"a": [1]}, "maybe": {"a": [1]}, "tree": {"a": [1]}, "count": 3, "some": 2.5, "list": [1, 2]})
    ],
    f"<function=book>{parameter('size', '1.0')}{parameter('gone', '1.0')}{parameter('loop', '1.0')}</function>": [
        ("book", dict.fromkeys(("size", "gone", "loop"), "1.0"))
    ],
    f"<function=book>{parameter('size', 'null')}{parameter('maybe', 'None')}</function>": [
        ("book", {"size": None, "maybe": None})
    ],
    f"<function=book>{parameter('nested', '5')}{parameter('many', '5')}</function>": [
        ("book", {"nested": 5, "many": 5})
    ],
    f"<function=book>{parameter('listed', '5')}{parameter('beyond', '5')}</function>": [
        ("book", {"listed": 5, "beyond": "5"})
    ],
    # White space, quotes and tags within a value.
    '<function=taxi><parameter=to>\n  if a < b:\n\n    "x"\n<br></function>\n</parameter></function>': [
        ("taxi", {"to": '  if a < b:\n\n    "x"\n<br></function>'})
    ],
    f"<function=taxi><parameter=to>\nDavis\n</function>{CLOSE}": [("taxi", {"to": "Davis"})],
    f"<function=taxi>\n<parameter=to>\nDavis\n{parameter('hour', '9')}\n</function>": [TAXI_CALL],
    f"<function=taxi><parameter=to>\n<parameter=note>\nb\n{parameter('hour', '9')}</function>": [
        ("taxi", {"to": "", "note": "b", "hour": 9})
    ],
    # Text.
    "": [],
    "a < b <function and so": ["a < b <function and so"],
    f"The tag {OPEN} is a tag": [f"The tag {OPEN} is a tag"],
    f"ends in {OPEN}\n<func": [f"ends in {OPEN}\n<func"],
    "<function=>x": ["<function=>x"],
    "<function=" + "a" * 300: ["<function=" + "a" * 300],
}
MISTRAL: dict[str, Found] = {
    '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]': [
        ("f", {"a": [1]}),
        ("g", {}),
    ],
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}, "id": "123456789"}]': [("f", {"a": "]"})],
    '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g.h[ARGS]{}': [("f", {"a": 1}), ("g.h", {})],
    '[TOOL_CALLS]f[CALL_ID]Ab1[ARGS]{"a": 1}[TOOL_CALLS]g [CALL_ID] 2 [ARGS] {}': [("f", {"a": 1}), ("g", {})],
    'Well.[TOOL_CALLS]f{"a": {"b": "}"}}': ["Well.", ("f", {"a": {"b": "}"}})],
    '[TOOL_CALLS]f [ARGS] {"a": 1}': [("f", {"a": 1})],
    '[TOOL_CALLS][{"name": "f", "arguments": {}}] Done, I think {.': [("f", {}), " Done, I think {."],
    # Text.
    "plain [TOOL": ["plain [TOOL"],
    "[TOOL_CALLS]nothing here": ["[TOOL_CALLS]nothing here"],
    "[TOOL_CALLS]f[ARGS]": ["[TOOL_CALLS]f[ARGS]"],
    "[TOOL_CALLS]f[CALL_ID]Ab1[AR": ["[TOOL_CALLS]f[CALL_ID]Ab1[AR"],
}
CASES: list[tuple[type[ToolParser], str, Found]] = [
    (kind, text, found)
    for kind, cases in ((PythonicParser, PYTHONIC), (Qwen3CoderParser, XML), (MistralParser, MISTRAL))
    for text, found in cases.items()
]


def read(parser: ToolParser, pieces: list[str]) -> Found:
    found: Found = []
    for item in [*(item for piece in pieces for item in parser.push(piece)), *parser.finish()]:
        if isinstance(item, CallStart):
            found.append((item.name, ""))
        elif isinstance(item, CallArguments):
            name, before = found[-1]
            found[-1] = (name, before + item.text)
        elif found and isinstance(found[-1], str):
            found[-1] += item
        else:
            found.append(item)
    return [each if isinstance(each, str) else (each[0], json.loads(each[1])) for each in found]


@given(case=st.sampled_from(CASES), cuts=st.sets(st.integers(0, 200), max_size=30))
def test_pieces_of_any_size_are_read_as_the_whole(case: tuple[type[ToolParser], str, Found], cuts: set[int]) -> None:
    kind, text, found = case
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert read(kind(FUNCTIONS), [text[start:stop] for start, stop in itertools.pairwise(places)]) == found


@pytest.mark.parametrize(("kind", "text", "found"), CASES)
def test_character_by_character(kind: type[ToolParser], text: str, found: Found) -> None:
    assert read(kind(FUNCTIONS), list(text)) == found
    assert read(kind(FUNCTIONS), [text]) == found


@given(
    kind=st.sampled_from(sorted(PARSERS)),
    parts=st.lists(
        st.sampled_from(
            [
                *(OPEN, CLOSE, "<function=f>", "</function>", "<parameter=a>", "</parameter>", "[TOOL_CALLS]"),
                *("[ARGS]", '{"name": "f", ', '"arguments": {', "}", "[", "]", "f(", ")", "a=1", ",", " ", "\n"),
                *('"', "x", "é", "<"),
            ]
        ),
        max_size=14,
    ),
)
def test_any_text_is_read_to_its_end(kind: str, parts: list[str]) -> None:
    """Without an error, and the same in pieces as whole."""

    def items(pieces: list[str]) -> list[tuple[str, str]]:
        parser = PARSERS[kind](FUNCTIONS)
        found = [*(item for piece in pieces for item in parser.push(piece)), *parser.finish()]
        joined: list[tuple[str, str]] = []
        for item in found:
            sort = "text" if isinstance(item, str) else type(item).__name__
            said = item if isinstance(item, str) else item.name if isinstance(item, CallStart) else item.text
            if joined and joined[-1][0] == sort != "CallStart":
                joined[-1] = (sort, joined[-1][1] + said)
            else:
                joined.append((sort, said))
        return joined

    text = "".join(parts)
    assert items(list(text)) == items(parts) == items([text])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% for tool in tools %}<tool_call>\n<function=example>{% endfor %}", "qwen3_coder"),
        ('<tools></tools> <tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call>', "hermes"),
        ("{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS]' }}", "mistral"),
        ("in the format of [func_name1(params_name1=params_value1...), func_name2(params)]", "pythonic"),
        ('{"name": function name, "parameters": dictionary}', "llama3_json"),
        ("<|python_tag|>", "llama3_json"),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", "none"),
    ],
)
def test_the_template_shows_the_form(template: str, name: str) -> None:
    assert form_name(template) == name
    assert parser_for("auto", template) is PARSERS[name]


def test_a_growing_call_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read from its beginning with every token: an argument of 8,000 tokens took 17 seconds."""
    num_read, text = 0, '[f(a="' + "long " * 500 + '")]'

    class Counted(pythonic_calls._CallEnd):
        def find(self, text: str) -> int | None:
            nonlocal num_read
            num_read += len(text) - self._num_read
            return super().find(text)

    monkeypatch.setattr(pythonic_calls, "_CallEnd", Counted)
    parser = PythonicParser()
    found = [item for char in text for item in parser.push(char)]
    assert found == [CallStart("f"), CallArguments(json.dumps({"a": "long " * 500}))]
    assert num_read <= len(text)
