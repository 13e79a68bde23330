"""Detection of the content format of a chat template, text or a list of parts, by rendering it."""

from collections.abc import Callable
from typing import Any

from specdec.core.chat_content import ContentFormat, template_messages

Render = Callable[[list[dict[str, Any]]], str]
# Words that no template writes. The last one marks a part that is written as it is, as a list of dicts.
_FIRST, _SECOND, _MARK = "qzxfirst", "qzxsecond", "qzxmark"
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
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
        plain = [template_messages(each, lambda other: self.of(other, render)) for each in (before, after)]
        try:
            return render([*plain[0], {"role": role, "content": content, **keys}, *plain[1]])
        except ValueError:
            return None
