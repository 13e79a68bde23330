"""Forms in which models write tool calls, and outputs that are calls and nothing else. Pure Python."""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class ForcedCalls:
    """An output that is calls and nothing else.

    Attributes:
        functions: names of those that may be called, each with the JSON schema of its arguments as text.
        form: that of the calls; None for the arguments of the first function alone.
        special: special tokens of the tokenizer by their texts, as far as they are tags.
        is_single: one call at most.
    """

    functions: tuple[tuple[str, str], ...]
    form: CallForm | None
    special: tuple[tuple[str, int], ...]
    is_single: bool
