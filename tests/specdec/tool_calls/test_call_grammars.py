"""Grammars of forced calls: whatever follows them is read as valid calls of allowed functions, and as nothing else."""

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from specdec.core.call_forms import HERMES, LLAMA3, CallForm
from specdec.core.call_grammar import forced_calls
from specdec.core.tool_choice import Function, ToolChoice, read_tool_choice
from specdec.openai.replies import FunctionCall
from specdec.tool_calls.tool_call_reader import CallArguments, CallStart
from specdec.tool_calls.tool_parsers import (
    HermesParser,
    Item,
    LlamaParser,
    PlainText,
    ToolParser,
    parser_of_answer,
)
from specdec.verify.grammar_state import Grammar
from tests.profiles import num_cases
from tests.specdec.structured.byte_grammars import accepts, compiler, random_output
from tests.specdec.structured.drawn_schemas import objects, parts
from tests.strategies import seeds

pytestmark = pytest.mark.slow

KINDS: list[type[ToolParser]] = [HermesParser, LlamaParser, PlainText]
NAMES = ("taxi", "get_weather", "a", 'q"\\', "é", "</tool_call>", "x-1")
DEFINITIONS = {"one": {"type": "integer"}, "a/b": {"type": "string", "maxLength": 2}}
SCHEMAS = st.one_of(
    objects(parts()).map(lambda schema: {**schema, "$defs": DEFINITIONS} if isinstance(schema, dict) else schema),
    st.sampled_from([None, {}, {"type": "object", "properties": {}}]),
)
TOOLS = st.dictionaries(st.sampled_from(NAMES), SCHEMAS, min_size=1, max_size=3)


def grammar(
    choice: ToolChoice, functions: Sequence[Function], form: CallForm | None, *, is_single: bool = False
) -> Grammar:
    params = forced_calls(choice, functions, form, {}, is_single=is_single)
    return compiler().compile(params)


def read(parser: ToolParser, pieces: Sequence[str]) -> list[FunctionCall]:
    """The calls of an answer, of which nothing is text."""
    items: list[Item] = [item for piece in pieces for item in parser.push(piece)]
    found: list[FunctionCall] = []
    for item in [*items, *parser.finish()]:
        if isinstance(item, CallStart):
            found.append(FunctionCall(item.name, ""))
        else:
            assert isinstance(item, CallArguments), item
            found[-1].arguments += item.text
    return found


# A third of the schemas is refused, and few lists have several functions that differ.
@pytest.mark.long
@settings(max_examples=num_cases(150))
@given(
    kind=st.sampled_from(KINDS),
    tools=TOOLS,
    mode=st.sampled_from(["required", "named", "allowed"]),
    is_single=st.booleans(),
    seed=seeds,
    cuts=st.sets(st.integers(1, 200)),
)
def test_every_output_is_valid_calls_of_allowed_functions(
    kind: type[ToolParser], tools: dict[str, Any], mode: str, is_single: bool, seed: int, cuts: set[int]
) -> None:
    first = next(iter(tools))
    names = {"required": list(tools), "named": [first], "allowed": [first, list(tools)[-1]]}[mode]
    references = [{"type": "function", "name": name} for name in names]
    given: Any = {
        "required": "required",
        "named": references[0],
        "allowed": {"type": "allowed_tools", "mode": "required", "tools": references},
    }[mode]
    described = [{"name": name, "parameters": schema} for name, schema in tools.items()]
    choice = read_tool_choice(given, described)
    functions = [Function.of(each) for each in described if choice.allows(each["name"])]
    try:
        calls_grammar = grammar(choice, functions, kind.FORM, is_single=is_single)
    except ValueError as error:
        # Function, place, problem and remedy; or what the library finds, which names neither of the first two.
        ours = r"tools: the parameters of .+ cannot be followed as an object: at .+;.+"
        if not re.fullmatch(rf"{ours}|tools cannot be followed: .+; correct it", str(error)):
            raise
        event("refused")
        return
    text = random_output(calls_grammar, seed, soon=150, most=1000)
    assume(text is not None)
    assert text is not None

    def parser() -> ToolParser:
        return parser_of_answer(kind, choice, [], is_single=is_single)

    calls = read(parser(), [text])
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert read(parser(), [text[start:end] for start, end in itertools.pairwise(places)]) == calls
    assert read(parser(), list(text)) == calls
    event(f"{min(len(calls), 2)} calls")
    # One that is cut off shows no markup.
    for cut in cuts:
        read(parser(), [text[:cut]])
    assert len(calls) == 1 if is_single or mode == "named" else calls
    for call in calls:
        assert call.name in names
        schema = tools[call.name] or {"type": "object", "maxProperties": 0}
        checker = Draft202012Validator({"type": "object", **schema}, format_checker=Draft202012Validator.FORMAT_CHECKER)
        assert checker.is_valid(json.loads(call.arguments)), text


TAXI = Function("taxi", {"type": "object", "properties": {"to": {"enum": ["Davis"]}}, "required": ["to"]})
ROOM = Function.of({"name": "room"})
REQUIRED = ToolChoice("required")
HERMES_TAXI = '<tool_call>\n{"name": "taxi", "arguments": {"to": "Davis"}}\n</tool_call>'
HERMES_ROOM = '<tool_call>\n{"name": "room", "arguments": {}}\n</tool_call>'
LLAMA_ROOM = '{"name": "room", "parameters": {}}'


def test_calls_have_the_form_that_the_model_was_trained_to_write() -> None:
    both = [TAXI, ROOM]
    for form, single, double in (
        (HERMES, HERMES_TAXI, f"{HERMES_TAXI}\n{HERMES_ROOM}"),
        (LLAMA3, LLAMA_ROOM, f"{LLAMA_ROOM}; {LLAMA_ROOM}"),
        (None, f"[{LLAMA_ROOM}]", f"[{LLAMA_ROOM}, {LLAMA_ROOM}]"),
    ):
        assert accepts(grammar(REQUIRED, both, form), single)
        assert accepts(grammar(REQUIRED, both, form), double)
        assert accepts(grammar(REQUIRED, both, form, is_single=True), single)
        assert not accepts(grammar(REQUIRED, both, form, is_single=True), double)
    named = ToolChoice("named", ["taxi"])
    assert accepts(grammar(named, [TAXI], HERMES), HERMES_TAXI)
    assert not accepts(grammar(named, [TAXI], HERMES), f"{HERMES_TAXI}\n{HERMES_TAXI}")
    assert accepts(grammar(named, [TAXI], None), '{"to": "Davis"}')


FUNCTIONS = [{"name": "taxi"}, {"name": "room"}]
CHOICES: list[tuple[Any, ToolChoice]] = [
    (None, ToolChoice("auto")),
    ("auto", ToolChoice("auto")),
    ("none", ToolChoice("none")),
    ("required", ToolChoice("required")),
    ({"type": "function", "function": {"name": "room"}}, ToolChoice("named", ["room"])),
    ({"type": "function", "name": "room"}, ToolChoice("named", ["room"])),
    (
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "taxi"}}]},
        },
        ToolChoice("required", ["taxi"]),
    ),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "taxi"}]},
        ToolChoice("auto", ["taxi"]),
    ),
]


@pytest.mark.parametrize(("given", "choice"), CHOICES)
def test_every_form_of_a_choice_is_read(given: Any, choice: ToolChoice) -> None:
    assert read_tool_choice(given, FUNCTIONS) == choice
    if given in (None, "auto", "none"):
        assert read_tool_choice(given, []) == ToolChoice("none")
    else:
        with pytest.raises(ValueError, match="the request offers no function; give at least one"):
            read_tool_choice(given, [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("any", "tool_choice is 'any'; it must be 'none', 'auto', 'required', a function or allowed_tools"),
        ({"type": "web_search"}, "it must be 'none', 'auto'"),
        ({"type": "function"}, "it must be a function, by its type and its name"),
        ({"type": "function", "function": {"name": 3}}, "it must be a function, by its type and its name"),
        ({"type": "function", "name": "bus"}, "tool_choice names 'bus', which is not in tools; name one that is"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "a list of at least one tool"),
        ({"type": "allowed_tools", "mode": "any", "tools": [{}]}, "give its mode, 'auto' or 'required'"),
        ({"type": "allowed_tools", "allowed_tools": None}, "give its mode, 'auto' or 'required'"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "it must be a function"),
    ],
)
def test_a_wrong_choice_is_refused_in_one_line(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_tool_choice(given, FUNCTIONS)
    assert "\n" not in str(caught.value)
