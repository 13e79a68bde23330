"""Forms in which models write tool calls, and the grammar of an output that is calls and nothing else. Pure Python."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.core.tool_choice import Function, ToolChoice
from specdec.json_schema.characters import json_text
from specdec.json_schema.gbnf import EMPTY, Alt, Node, Repeat, Rule, Text, Token, grammar_text, seq
from specdec.json_schema.schema import SchemaError
from specdec.json_schema.schema_grammar import schema_rules


@dataclass(frozen=True)
class CallForm:
    """Form of calls, each of which is a JSON object with the function's name and its arguments.

    Attributes:
        arguments: key of the arguments.
        opening, closing: tags around each call, which may be special tokens of a tokenizer.
        padding: white space between a tag and its object.
        between: text between two calls.
        first, last: text around all of them.
    """

    arguments: str
    opening: str = ""
    closing: str = ""
    padding: str = ""
    between: str = ""
    first: str = ""
    last: str = ""


HERMES = CallForm("arguments", "<tool_call>", "</tool_call>", padding="\n", between="\n")
LLAMA3 = CallForm("parameters", between="; ")
# Of models whose own form is not known, as in vLLM: a JSON list.
LISTED = CallForm("parameters", between=", ", first="[", last="]")

# By the names of the server's `--tool-call-parser`. Forms that are no JSON are not forced.
FORMS = {"hermes": HERMES, "llama3_json": LLAMA3}
# What a chat template holds of a form; the first that it holds is its own. Qwen3-Coder's calls have Hermes' tags.
_SIGNS = (
    ("qwen3_coder", ("<function=",)),
    ("hermes", (HERMES.opening,)),
    ("mistral", ("[TOOL_CALLS]",)),
    # Meta's words for Llama 3.2, as vLLM's template has them.
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("python_tag", '"parameters"')),
)


def form_name(template: str) -> str:
    """Return the name of the form that a chat template shows, `none` if it shows none that is known."""
    return next((name for name, signs in _SIGNS if any(sign in template for sign in signs)), "none")


def forced_calls(
    choice: ToolChoice,
    functions: Sequence[Function],
    form: CallForm | None,
    special: Mapping[str, int],
    *,
    is_single: bool,
) -> StructuredOutputsParams:
    """Return the form of an output that is calls.

    Args:
        functions: those that may be called.
        form: the model's; None if it is not known. Calls are then `LISTED`, and a named function's is its arguments
            alone.
        special: special tokens of the tokenizer by their texts, as far as they are tags.
        is_single: one call at most.

    Raises:
        ValueError: parameters that cannot be followed; names the function, the place and the remedy.
    """
    if form is None and choice.mode == "named":
        text = grammar_text(*_arguments(functions[0], ""))
    else:
        is_single = is_single or choice.mode == "named"
        text = _calls(form or LISTED, functions, special, is_single)
    assert text is not None
    return StructuredOutputsParams(grammar=text)


def _calls(form: CallForm, functions: Sequence[Function], special: Mapping[str, int], is_single: bool) -> str | None:
    rules: dict[str, Node] = {}
    objects: list[Node] = []
    for index, function in enumerate(functions):
        arguments, own = _arguments(function, f"f{index}-")
        rules |= own
        head = f'{{"name": {json_text(function.name)}, "{form.arguments}": '
        objects.append(seq(Text(head), arguments, Text("}")))
    opening, closing = (Token(special[tag]) if tag in special else Text(tag) for tag in (form.opening, form.closing))
    rules["call"] = seq(opening, Text(form.padding), Alt(tuple(objects)), Text(form.padding), closing)
    more = EMPTY if is_single else Repeat(seq(Text(form.between), Rule("call")), 0, None)
    return grammar_text(seq(Text(form.first), Rule("call"), more, Text(form.last)), rules)


def _arguments(function: Function, prefix: str) -> tuple[Node, dict[str, Node]]:
    """Return the arguments of a function, an object by its schema, and the rules that they refer to."""
    problem = f"tools: the parameters of {function.name!r:.60}"
    try:
        schema = json.loads(json.dumps(function.parameters, allow_nan=False))
        return schema_rules(schema, ["object"], prefix)
    except SchemaError as error:
        raise ValueError(f"{problem} cannot be followed as an object: {error}") from None
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{problem} hold a value that JSON does not have, or are nested too deeply") from None
