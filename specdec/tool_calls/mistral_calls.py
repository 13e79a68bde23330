"""Tool calls in the forms of Mistral's models."""

import re
from typing import ClassVar

from specdec.core.call_forms import CallForm
from specdec.json_schema.characters import json_text
from specdec.tool_calls.tagged_calls import TaggedCalls

_NAMED = re.compile(r"([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
_LIST_END = re.compile(r"\A\s*\]")
# What may still become one.
_BEGUN = re.compile(r"[\w.-]+\s*(\[(A(R(G(S(\]\s*)?)?)?)?)?)?")


class MistralParser(TaggedCalls):
    """Calls behind `[TOOL_CALLS]`: `[{"name": ..., "arguments": {...}}, ...]`, or in later models `NAME[ARGS]{...}`."""

    FORM: ClassVar[CallForm | None] = None
    OPEN = "[TOOL_CALLS]"
    INNER: ClassVar[tuple[str, ...]] = ("[ARGS]",)
    BEFORE: ClassVar[str] = "["
    BEHIND: ClassVar[str] = ",;]"

    def _leave(self, unread: str) -> None:
        super()._leave(_LIST_END.sub("", unread) if self._is_after_call else unread)

    def _as_object(self, text: str) -> tuple[str, bool]:
        if self._has_object:
            return text, False
        if named := _NAMED.match(text):
            # Its last brace is missing, as where a model forgets to close a call.
            return f'{{"name": {json_text(named[1])}, "arguments": {text[named.end() :]}', False
        return text, _BEGUN.fullmatch(text) is not None
