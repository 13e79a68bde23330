"""Tool calls in the forms of Mistral's models."""

import re
from typing import ClassVar

from specdec.json_schema.schema import json_text
from specdec.tool_calls.tagged_calls import TaggedCalls

_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
_LIST_END = re.compile(r"\A\s*\]")


def _begun(tag: str, behind: str) -> str:
    """Return the expression of the beginnings of a tag, and of the tag with what may stand behind it."""
    for char in reversed(tag):
        behind = f"(?:{re.escape(char)}{behind})?"
    return behind


_BEGUN_ARGUMENTS = _begun(_ARGUMENTS, r"\s*")
_BEGUN_ID = _begun(_ID, rf"\s*(?:\w+\s*{_BEGUN_ARGUMENTS})?")
# What may still become one.
_BEGUN = re.compile(rf"[\w.-]+\s*(?:{_BEGUN_ID}|{_BEGUN_ARGUMENTS})")


class MistralParser(TaggedCalls):
    """Calls behind `[TOOL_CALLS]`: `[{"name": ..., "arguments": {...}}, ...]`, or in later models `NAME[ARGS]{...}`.

    Some write `[CALL_ID]` and an id of theirs behind the name; answers have ids of our own.
    """

    OPEN = "[TOOL_CALLS]"
    INNER: ClassVar[tuple[str, ...]] = (_ID, _ARGUMENTS)
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
