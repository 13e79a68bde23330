"""Tools of a chat with the Python API: those that the chat template shows, and calls that are forced."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec.core.call_forms import FORMS, form_name
from specdec.core.call_grammar import forced_calls
from specdec.core.sampling_params import SamplingParams
from specdec.core.tool_choice import Function, read_tool_choice
from specdec.models.tokenizer import Tokenizer


def with_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    given: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams,
    tokenizer: Tokenizer,
    template: str,
) -> tuple[SamplingParams | Sequence[SamplingParams] | None, dict[str, Any]]:
    """Return sampling parameters of a chat, with the form of the calls if calls are forced, and the template's tools.

    Args:
        tools: as OpenAI describes them.
        tool_choice: OpenAI's.
        default: parameters where none are given.
        template: the chat template, which shows the model's form of calls.

    Raises:
        ValueError: tools that are no list, another choice, or one that does not fit the tools; a function whose
            parameters cannot be followed, or sampling parameters with a form of their own.
    """
    tools = () if tools is None else tools
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools is {tools!r:.60}; it must be a list of OpenAI's descriptions of functions")
    choice = read_tool_choice(tool_choice, [tool.get("function") for tool in tools])
    shown = [tool for tool in tools if choice.shows(_function(tool).get("name"))]
    arguments = {"tools": shown} if shown else {}
    if not choice.is_forced:
        return given, arguments
    functions = [Function.of(_function(tool)) for tool in tools]
    allowed = [function for function in functions if choice.allows(function.name)]
    form = FORMS.get(form_name(template))
    special = {} if form is None else tokenizer.special_named((form.opening, form.closing))
    structure = forced_calls(choice, allowed, form, special, is_single=False)

    def forced(params: SamplingParams) -> SamplingParams:
        if params.structured_outputs is not None:
            raise ValueError("structured_outputs and a tool_choice that forces calls exclude each other; give one")
        kept = sorted({*(params.kept_special_tokens or ()), *special.values()}) or None
        return replace(params, structured_outputs=structure, kept_special_tokens=kept)

    if isinstance(given, SamplingParams | None):
        return forced(default if given is None else given), arguments
    return [forced(params) for params in given], arguments


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}
