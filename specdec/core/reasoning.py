"""Reasoning parsers by vLLM's names: the marks between a model's thinking and its answer. Pure Python."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from specdec.core.errors import wrong


class ReasoningParser:
    """Marks around a model's thinking, with which an output begins. A model of another form needs a subclass.

    As in vLLM, all before the end mark is thinking: a missing start mark stood in the prompt, and an output without an
    end mark was cut off while it thought.

    Attributes:
        START, END: texts of the marks, each of which is one token.
        ALSO_END: texts that end the thinking too, and that belong to the answer, such as the tag of a tool call.
    """

    START: ClassVar[str] = "<think>"
    END: ClassVar[str] = "</think>"
    ALSO_END: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def is_enabled(cls, template_arguments: Mapping[str, Any]) -> bool:  # noqa: ARG003
        """Return whether answers begin with thinking where the chat template gets these arguments."""
        return True


class DeepSeekR1Parser(ReasoningParser):
    """DeepSeek-R1 and its distills, which always think."""


class Qwen3Parser(ReasoningParser):
    """Qwen3, which thinks unless `enable_thinking` is false, and may call a tool without an end mark before it."""

    ALSO_END: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    @classmethod
    def is_enabled(cls, template_arguments: Mapping[str, Any]) -> bool:
        return template_arguments.get("enable_thinking", True) is not False


PARSERS: dict[str, type[ReasoningParser]] = {"deepseek_r1": DeepSeekR1Parser, "qwen3": Qwen3Parser}


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """Return the parser of a setting: a name of `PARSERS`, or MODULE:CLASS, which is imported.

    Raises:
        ValueError: another name, or a class that cannot be imported or is none.
    """
    if name in PARSERS:
        return PARSERS[name]
    module, colon, attribute = name.partition(":")
    known = f"it must be {', '.join(PARSERS)}, or MODULE:CLASS"
    if not colon:
        raise wrong("reasoning_parser", f"is {name!r:.100}; {known}")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise wrong("reasoning_parser", f"{name!r:.100} cannot be imported: {error}; {known}") from None
    if not (isinstance(found, type) and issubclass(found, ReasoningParser) and found.START and found.END):
        wanted = "a specdec.core.reasoning.ReasoningParser with marks START and END"
        raise wrong("reasoning_parser", f"{name!r:.100} is {found!r:.60}; the class must be {wanted}")
    return found
