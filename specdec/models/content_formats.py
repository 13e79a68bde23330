"""Detection of the content format of a chat template, text or a list of parts, by rendering it."""

from collections.abc import Callable
from typing import Any

from specdec.core.chat_content import ContentFormat, template_messages

Render = Callable[[list[dict[str, Any]]], str]
# Words that no template writes. The last one marks a part that is written as it is, as a list of dicts.
_FIRST, _SECOND, _MARK = "qzxfirst", "qzxsecond", "qzxmark"
_VALUE = "qzxvalue"
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": _VALUE}}}
_USER = {"role": "user", "content": "a"}
# Messages before a role's, further keys of its own, and messages after it, as templates want them.
_AROUND: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]] = {
    "system": ([], {}, [_USER]),
    "user": ([], {}, []),
    "assistant": ([_USER], {}, [_USER]),
    "tool": ([_USER, {"role": "assistant", "tool_calls": [_CALL]}], {"tool_call_id": _CALL["id"], "name": "f"}, []),
}


class ContentFormats:
    """The formats of one chat template, by role.

    vLLM looks for loops over content in the template's code. Templates read parts in other ways too: by index, through
    macros and filters, or for some roles only. So each role's content is rendered in both formats, and that is taken
    which does not lose text.
    """

    def __init__(self) -> None:
        self._known: dict[str, ContentFormat] = {}
        self._joins_arguments: bool | None = None

    def of(self, role: str, render: Render) -> ContentFormat:
        """Return the format of a role's content.

        Args:
            render: returns the text of messages; raises ValueError where the template refuses them.
        """
        if role not in self._known:
            found = self._found(role, render)
            if found is None:
                # Another conversation, with other variables of the template, may tell.
                return ContentFormat.STRING if role == "user" else self.of("user", render)
            self._known[role] = found
        return self._known[role]

    def joins_arguments(self, render: Render) -> bool:
        """Return whether arguments of calls must be JSON text, as in DeepSeek's templates, and not objects.

        Args:
            render: see `of`.
        """
        if self._joins_arguments is None:
            as_text = (as_text for as_text in (False, True) if self._shows_call(as_text, render))
            self._joins_arguments = next(as_text, None)
        return bool(self._joins_arguments)

    def _shows_call(self, as_text: bool, render: Render) -> bool:
        messages = [_USER, {"role": "assistant", "tool_calls": [_CALL]}]
        try:
            return _VALUE in render(template_messages(messages, lambda role: self.of(role, render), lambda: as_text))
        except ValueError:
            return False

    def _found(self, role: str, render: Render) -> ContentFormat | None:
        """Return the format, None where the text is lost in both, or the template refuses them."""
        parts = [{"type": "text", "text": text, _MARK: 1} for text in (_FIRST, _SECOND)]
        text = self._rendered(role, parts, render)
        if text is not None and _FIRST in text and _MARK not in text:
            return ContentFormat.PARTS if _SECOND in text else ContentFormat.ONE_PART
        text = self._rendered(role, _FIRST, render)
        return ContentFormat.STRING if text is not None and _FIRST in text else None

    def _rendered(self, role: str, content: object, render: Render) -> str | None:
        """Return the text of a conversation in which a message of the role has this content."""
        before, keys, after = _AROUND.get(role, _AROUND["system"])
        forms = lambda other: self.of(other, render), lambda: self.joins_arguments(render)
        plain = [template_messages(each, *forms) for each in (before, after)]
        try:
            return render([*plain[0], {"role": role, "content": content, **keys}, *plain[1]])
        except ValueError:
            return None
