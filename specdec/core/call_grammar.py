"""Forced tool calls: the form of such an output, and its grammar. Pure Python."""

import json
from collections.abc import Mapping, Sequence

from specdec.core.call_forms import LISTED, CallForm, ForcedCalls
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.core.tool_choice import Function, ToolChoice
from specdec.json_schema.schema import SchemaError, declared_types, followed_schema, json_rule, json_text
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
    """Return the rules of an output that is calls, in Lark's form.

    Raises:
        ValueError: parameters that cannot be followed; names the function, the place and the remedy.
    """
    form = calls.form
    if form is None:
        return f"start: {_arguments(*calls.functions[0])}"
    objects = []
    for name, schema in calls.functions:
        head = f'{{"name": {json_text(name)}, "{form.arguments}": '
        objects.append(f'{_text(head)} {_arguments(name, schema)} "}}"')
    special = dict(calls.special)
    opening, closing = (f"<[{special[tag]}]>" if tag in special else _text(tag) for tag in (form.opening, form.closing))
    padding, one_of = _text(form.padding), "\n  | ".join(objects)
    more = "" if calls.is_single else f"({_text(form.between)} call)*"
    return (
        f"start: {_text(form.first)} call {more} {_text(form.last)}\n"
        f"call: {opening} {padding} object {padding} {closing}\nobject: {one_of}"
    )


def _text(text: str) -> str:
    return json.dumps(text)


def _arguments(name: str, schema: str) -> str:
    """Return the arguments of a function, an object by its schema."""
    try:
        found = followed_schema(json.loads(schema))
        if "object" not in declared_types(found):
            raise SchemaError("", f"type is {found['type']!r:.50}; it must be 'object'")
    except SchemaError as error:
        message = f"tools: the parameters of {name!r:.60} cannot be followed as an object: {error}"
        raise ParameterError("structured_outputs", message) from None
    except RecursionError:
        raise _no_json(name) from None
    return json_rule({**found, "type": "object"}, in_one_line=True)


def _no_json(name: str) -> ParameterError:
    message = f"tools: the parameters of {name!r:.60} hold a value that JSON does not have, or are nested too deeply"
    return ParameterError("structured_outputs", message)
