"""Grammars of the forms that requests give, in Lark's form as llguidance reads it."""

import json
import re

from specdec.core.call_grammar import calls_grammar
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.json_schema.schema import SchemaError, followed_schema, json_rule, plain_sets
from specdec.kernels.types.settings import ParameterError

# A mask holds all ways to cut a text into tokens: the model chooses among them.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# Longest message of the grammar library that is shown.
_LONGEST_REASON = 200
# Escapes of GBNF by four and eight digits, whose zeros the library (1.9) drops; and that of a backslash.
_ESCAPES = re.compile(r"\\(?:\\|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")
# Parts of the library's messages, and what stands in their place.
_WORDS = (
    (re.compile(r"^(at )?\d+\(\d+\): |failed to compile JSON schema: |(?<=: )error: "), ""),
    (re.compile(r"(Unsatisfiable schema: )?Regex is empty: .*"), "no text has its patterns and lengths"),
    (re.compile(r"oneOf constraints .*"), "'oneOf' of schemas that may overlap is not supported; write 'anyOf'"),
)


def grammar_source(params: StructuredOutputsParams) -> str:
    """Return the grammar of a form.

    Raises:
        ValueError: a schema that cannot be followed, or a grammar in GBNF that is none.
    """
    return _OPTIONS + _rules(params)


def _rules(params: StructuredOutputsParams) -> str:
    if params.calls is not None:
        return calls_grammar(params.calls)
    if params.regex is not None:
        return _expression(params.regex)
    if params.grammar is not None:
        return _lark(params.grammar)
    if params.choice is not None:
        return _expression("|".join(map(re.escape, params.choice)))
    schema = {"type": "object"} if params.json is None else json.loads(str(params.json))
    try:
        return f"start: {json_rule(followed_schema(schema), in_one_line=params.disable_any_whitespace)}"
    except SchemaError as error:
        raise ParameterError("structured_outputs", f"structured_outputs.json: {error}") from None
    except RecursionError:
        raise ParameterError("structured_outputs", "structured_outputs.json is nested too deeply; flatten it") from None


def _expression(regex: str) -> str:
    from llguidance import regex_to_lark

    # As in ECMAScript, `\d` and `\w` are ASCII.
    return f"start: /{regex_to_lark(plain_sets(regex), 'dw')}/"


def _lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    try:
        return grammar if is_lark_syntax(grammar) else gbnf_to_lark(_ESCAPES.sub(_character, grammar))
    except Exception as error:  # The library raises a bare Exception.
        raise not_followed("structured_outputs.grammar", str(error)) from None


def _character(escape: re.Match[str]) -> str:
    if (digits := escape[1] or escape[2]) is None:
        return escape[0]
    code = int(digits, 16)
    return f"\\x{code:02x}" if code < 256 else chr(code)


def not_followed(form: str, message: str) -> ParameterError:
    """Return the error of a form that the library refuses, in one line and without the library's own places.

    Args:
        form: as messages name it.
        message: the library's.
    """
    lines = message.splitlines() or [""]
    errors = [place for place, line in enumerate(lines) if line.startswith("error: ")]
    # That of an expression stands behind the expression and a mark below it.
    line = f"{lines[errors[0] - 2].strip()!r:.80}: {lines[errors[0]]}" if errors and errors[0] > 1 else lines[0]
    for words, ours in _WORDS:
        line = words.sub(ours, line)
    reason = line[:_LONGEST_REASON]
    return ParameterError("structured_outputs", f"{form} cannot be followed: {reason}; correct it")
