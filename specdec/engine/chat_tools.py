"""Tools of a chat with the Python API: those that the chat template shows, and calls that are forced."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec.core.call_grammar import FORMS, forced_calls, form_name
from specdec.core.sampling_params import SamplingParams
from specdec.core.tool_choice import Function, ToolChoice, read_tool_choice
from specdec.models.tokenizer import Tokenizer


class ChatTools:
    """Tools that a chat offers.

    Args:
        tools: as OpenAI describes them.
        tool_choice: OpenAI's.

    Raises:
        ValueError: another choice, or one that does not fit the tools.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any] | None) -> None:
        self._tools = list(tools)
        self._choice: ToolChoice = read_tool_choice(tool_choice, [tool.get("function") for tool in self._tools])

    def template_arguments(self) -> dict[str, Any]:
        """Return what the chat template gets."""
        shown = [tool for tool in self._tools if self._choice.shows(_function(tool).get("name"))]
        return {"tools": shown} if shown else {}

    def params(
        self,
        given: SamplingParams | Sequence[SamplingParams] | None,
        default: SamplingParams,
        tokenizer: Tokenizer,
        template: str,
    ) -> SamplingParams | Sequence[SamplingParams] | None:
        """Return sampling parameters with the form of the calls, if calls are forced.

        Args:
            template: the chat template, which shows the model's form of calls.

        Raises:
            ValueError: a function whose parameters cannot be followed, or parameters with a form of their own.
        """
        if not self._choice.is_forced:
            return given
        functions = [Function.of(_function(tool)) for tool in self._tools]
        allowed = [function for function in functions if self._choice.allows(function.name)]
        form = FORMS.get(form_name(template))
        special = {} if form is None else tokenizer.special_named((form.opening, form.closing))
        structure = forced_calls(self._choice, allowed, form, special, is_single=False)

        def forced(params: SamplingParams) -> SamplingParams:
            if params.structured_outputs is not None:
                raise ValueError("structured_outputs and a tool_choice that forces calls exclude each other; give one")
            kept = sorted({*(params.kept_special_tokens or ()), *special.values()}) or None
            return replace(params, structured_outputs=structure, kept_special_tokens=kept)

        if isinstance(given, SamplingParams | None):
            return forced(default if given is None else given)
        return [forced(params) for params in given]


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}
