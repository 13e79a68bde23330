"""Conversion of messages from the forms that clients send to the form that a chat template reads. Pure Python."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from specdec.kernels.types.settings import check_text

# Key of the text in a content part, by the part's type.
_TEXT_KEYS = {
    **dict.fromkeys(("text", "input_text", "output_text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}
# Templates read one of these names.
REASONING = ("reasoning_content", "reasoning")


class ContentFormat(Enum):
    """Form of a message's content that a chat template reads.

    Attributes:
        STRING: as text.
        PARTS: as a list of OpenAI's content parts.
        ONE_PART: as a list of which it reads the first part only.
    """

    STRING = "string"
    PARTS = "openai"
    ONE_PART = "openai, first part"

    def content(self, texts: Sequence[str]) -> str | list[dict[str, Any]]:
        """Return content of these texts; where they are joined, each stands in lines of its own, as in vLLM."""
        if self is ContentFormat.STRING:
            return "\n".join(texts)
        if self is ContentFormat.ONE_PART:
            texts = ["\n".join(texts)]
        return [{"type": "text", "text": text} for text in texts]


def part_texts(parts: Iterable[Any]) -> list[str]:
    """Return the text of each of OpenAI's content parts.

    Raises:
        ValueError: a part that is no text.
    """
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else part
        text = part
        if not isinstance(part, str):
            key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
            text = None if key is None else part.get(key)
            if key is not None and text is None:
                raise ValueError(f"a content part of type {kind!r:.60} has no {key}; give it")
        if not isinstance(text, str):
            raise ValueError(f"a content part is of type {kind!r:.60}; only text is supported")
        check_text("a content part", text)
        texts.append(text)
    return texts


def template_messages(
    messages: Sequence[Any],
    format_of: Callable[[str], ContentFormat],
    joins_arguments: Callable[[], bool] = lambda: False,
    *,
    knows_developers: bool = False,
    has_short_ids: bool = False,
) -> list[dict[str, Any]]:
    """Return messages as chat templates read them.

    Content has the template's format, a refusal is content, and arguments of calls are objects. Null and an empty list
    of calls are left out. Further keys go to the template as they are.

    Args:
        format_of: how the template reads content of a role.
        joins_arguments: whether the template wants arguments of calls as JSON text; asked where there are calls.
        knows_developers: whether the template has the role `developer`; it is `system` otherwise.
        has_short_ids: whether ids of calls must have 9 letters and digits, as in Mistral's templates.

    Raises:
        ValueError: no mapping, content other than text, text that has no UTF-8 form, or a call that is none.
    """
    found = [_message(message, format_of, joins_arguments, knows_developers) for message in messages]
    if has_short_ids:
        for message in found:
            for holder, key in [(message, "tool_call_id"), *((call, "id") for call in message.get("tool_calls", ()))]:
                if isinstance(given := holder.get(key), str):
                    holder[key] = re.sub("[^a-zA-Z0-9]", "", given)[-9:].rjust(9, "0")
    return found


def _message(
    message: Any,
    format_of: Callable[[str], ContentFormat],
    joins_arguments: Callable[[], bool],
    knows_developers: bool,
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is {message!r:.60}; it must be a dict with role and content")
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(f"a message's role is {role!r:.60}; it must be text, such as 'user'")
    if role == "developer" and not knows_developers:
        role = "system"
    given = {key: value for key, value in message.items() if value is not None}
    plain = {**given, "role": role, "content": format_of(role).content(_texts(given))}
    plain.pop("refusal", None)
    if calls := given.get("tool_calls"):
        plain["tool_calls"] = [_call(call, joins_arguments()) for call in _listed(calls)]
    else:
        plain.pop("tool_calls", None)
    if reasoning := next((given[key] for key in REASONING if given.get(key)), None):
        plain |= dict.fromkeys(REASONING, reasoning)
    for key, value in plain.items():
        if isinstance(value, str):
            check_text(f"the message's {key}", value)
    return plain


def _texts(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message's content, or of its refusal."""
    content = message.get("content")
    if content in (None, "", []):
        content = message.get("refusal", [])
    if isinstance(content, str):
        return [content]
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return part_texts(content)
    raise ValueError(f"a message's content is {content!r:.60}; it must be text or a list of parts")


def _listed(calls: Any) -> Sequence[Any]:
    if isinstance(calls, Sequence) and not isinstance(calls, str | bytes):
        return calls
    raise ValueError(f"a message's tool_calls are {calls!r:.60}; they must be a list")


def _call(call: Any, as_text: bool) -> Any:
    """Return a call with its arguments as an object, which clients send as JSON text, or as such text again."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"a tool call is {call!r:.60}; it must be an object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise ValueError("the arguments of a tool call are not valid JSON; send the text of an object") from None
    arguments = {} if arguments is None else arguments
    written = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    return {**call, "function": {**function, "arguments": written}}
