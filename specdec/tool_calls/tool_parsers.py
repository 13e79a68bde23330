"""The parser of an answer's tool calls, by the model's form of calls and by what the request wants."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.core.call_forms import form_name
from specdec.core.tool_choice import ToolChoice
from specdec.tool_calls.mistral_calls import MistralParser
from specdec.tool_calls.pythonic_calls import PythonicParser
from specdec.tool_calls.tagged_calls import HermesParser, Item, ListedCalls, LlamaParser, ToolParser
from specdec.tool_calls.tool_call_reader import CallArguments, CallStart
from specdec.tool_calls.xml_calls import Qwen3CoderParser


class PlainText(ToolParser):
    """An answer without calls."""

    def push(self, text: str) -> list[Item]:
        return [text] if text else []


class FirstCall(ToolParser):
    """Parser that drops all calls but the first, for `parallel_tool_calls` false."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._num_calls = 0

    def push(self, text: str) -> list[Item]:
        return list(self._kept(self._parser.push(text)))

    def finish(self) -> list[Item]:
        return list(self._kept(self._parser.finish()))

    def _kept(self, items: Sequence[Item]) -> Iterator[Item]:
        for item in items:
            self._num_calls += isinstance(item, CallStart)
            if isinstance(item, str) or self._num_calls <= 1:
                yield item


class NamedCall(ToolParser):
    """An answer that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name, self._has_begun = name, False

    def push(self, text: str) -> list[Item]:
        if not text:
            return []
        start: list[Item] = [] if self._has_begun else [CallStart(self._name)]
        self._has_begun = True
        return [*start, CallArguments(text)]


# By the names of the server's `--tool-call-parser`.
PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "mistral": MistralParser,
    "none": PlainText,
}


def parser_for(choice: str, template: str) -> type[ToolParser]:
    """Return the parser of a setting's name, "auto" or one of `PARSERS`.

    Args:
        template: text of the model's chat template, by which "auto" recognises the form.
    """
    if choice == "auto":
        choice = form_name(template)
    return PARSERS[choice]


def parser_of_answer(
    kind: type[ToolParser], calls: ToolChoice, offered: Sequence[Mapping[str, Any]], *, is_single: bool
) -> ToolParser:
    """Return the parser of the answer to a request, by the server's form of calls.

    Args:
        calls: those that the request wants.
        offered: OpenAI's objects of the functions that the request offers.
        is_single: one call at most.
    """
    if calls.mode == "none":
        return PlainText()
    if kind.FORM is None and calls.is_forced:
        return NamedCall(calls.names[0]) if calls.mode == "named" and calls.names else ListedCalls()
    parser = kind(offered)
    return FirstCall(parser) if is_single else parser
