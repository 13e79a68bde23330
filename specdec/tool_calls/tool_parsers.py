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


class WantedItems(ToolParser):
    """Parser that drops what a request does not want.

    Args:
        is_single: all calls but the first are dropped, for `parallel_tool_calls` false.
        has_text: whether the answer may hold text. That of forced calls is the beginning of a call that is cut off.
    """

    def __init__(self, parser: ToolParser, *, is_single: bool, has_text: bool) -> None:
        self._parser, self._is_single, self._has_text = parser, is_single, has_text
        self._num_calls = 0

    def push(self, text: str) -> list[Item]:
        return list(self._kept(self._parser.push(text)))

    def finish(self) -> list[Item]:
        return list(self._kept(self._parser.finish()))

    def _kept(self, items: Sequence[Item]) -> Iterator[Item]:
        for item in items:
            self._num_calls += isinstance(item, CallStart)
            is_dropped = not self._has_text if isinstance(item, str) else self._is_single and self._num_calls > 1
            if not is_dropped:
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
    parser: ToolParser = kind(offered)
    if kind.FORM is None and calls.is_forced:
        parser = NamedCall(calls.names[0]) if calls.mode == "named" and calls.names else ListedCalls()
    return WantedItems(parser, is_single=is_single, has_text=not calls.is_forced)
