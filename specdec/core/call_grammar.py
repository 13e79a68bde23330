"""Forced tool calls: the form of such an output, and its grammar. Pure Python."""

import json
from collections.abc import Mapping, Sequence

from specdec.core.call_forms import LISTED, CallForm, ForcedCalls
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.core.tool_choice import Function, ToolChoice
from specdec.json_schema.characters import json_text
from specdec.json_schema.gbnf import EMPTY, Alt, Node, Repeat, Rule, Text, Token, grammar_text, seq
from specdec.json_schema.schema import SchemaError
from specdec.json_schema.schema_grammar import schema_rules
from specdec.kernels.types.settings import ParameterError


def forced_calls(
    choice: ToolChoice,
    functions: Sequence[Function],
    form: CallForm | None,
    special: Mapping[str, int],
    *,
    is_single: bool,
) -> StructuredOutputsParams:
    """Return the form of an output that is calls. Whether parameters can be followed is seen when a request begins.

    Args:
        functions: those that may be called.
        form: the model's; None if it is not known. Calls are then `LISTED`, and a named function's is its arguments
            alone.
        special: special tokens of the tokenizer by their texts, as far as they are tags.
        is_single: one call at most.

    Raises:
        ValueError: parameters that are no JSON; names the function.
    """
    is_named = choice.mode == "named"
    calls = ForcedCalls(
        tuple((function.name, _schema_text(function)) for function in functions),
        LISTED if form is None and not is_named else form,
        tuple(special.items()),
        is_single or is_named,
    )
    return StructuredOutputsParams(calls=calls)


def _schema_text(function: Function) -> str:
    try:
        return json.dumps(function.parameters, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise _no_json(function.name) from None


def calls_grammar(calls: ForcedCalls) -> str:
    """Return the grammar of an output that is calls, in GBNF. A pattern of a schema may take for ever.

    Raises:
        ValueError: parameters that cannot be followed; names the function, the place and the remedy.
    """
    form = calls.form
    if form is None:
        return _text(*_arguments(*calls.functions[0], ""))
    rules: dict[str, Node] = {}
    objects: list[Node] = []
    for index, (name, schema) in enumerate(calls.functions):
        arguments, own = _arguments(name, schema, f"f{index}-")
        rules |= own
        head = f'{{"name": {json_text(name)}, "{form.arguments}": '
        objects.append(seq(Text(head), arguments, Text("}")))
    special = dict(calls.special)
    opening, closing = (Token(special[tag]) if tag in special else Text(tag) for tag in (form.opening, form.closing))
    rules["call"] = seq(opening, Text(form.padding), Alt(tuple(objects)), Text(form.padding), closing)
    more = EMPTY if calls.is_single else Repeat(seq(Text(form.between), Rule("call")), 0, None)
    return _text(seq(Text(form.first), Rule("call"), more, Text(form.last)), rules)


def _text(root: Node, rules: Mapping[str, Node]) -> str:
    text = grammar_text(root, rules)
    assert text is not None
    return text


def _arguments(name: str, schema: str, prefix: str) -> tuple[Node, dict[str, Node]]:
    """Return the arguments of a function, an object by its schema, and the rules that they refer to."""
    try:
        return schema_rules(json.loads(schema), ["object"], prefix)
    except SchemaError as error:
        message = f"tools: the parameters of {name!r:.60} cannot be followed as an object: {error}"
        raise ParameterError("structured_outputs", message) from None
    except RecursionError:
        raise _no_json(name) from None


def _no_json(name: str) -> ParameterError:
    message = f"tools: the parameters of {name!r:.60} hold a value that JSON does not have, or are nested too deeply"
    return ParameterError("structured_outputs", message)
