"""Messages of a conversation as chat templates read them: with text as content. Pure Python."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec.kernels.settings import check_text

_TEXT = ("text", "input_text", "output_text")


def joined_parts(parts: Iterable[tuple[Any, Any]]) -> str:
    """Return the text of OpenAI's content parts; each stands in lines of its own, as in vLLM.

    Args:
        parts: type and text of each.

    Raises:
        ValueError: a part that is no text.
    """
    texts = []
    for kind, text in parts:
        if kind not in _TEXT or not isinstance(text, str):
            raise ValueError(f"a content part is of type {kind!r}; only text is supported")
        texts.append(text)
    return "\n".join(texts)


def plain_message(message: Any) -> dict[str, Any]:
    """Return a message with its content as text.

    Raises:
        ValueError: no mapping, content other than text, or text that has no UTF-8 form.
    """
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is {message!r:.60}; it must be a dict with role and content")
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        plain["content"] = joined_parts(map(_part, content))
    for key, value in plain.items():
        if isinstance(value, str):
            check_text(f"the message's {key}", value)
    return plain


def _part(part: Any) -> tuple[Any, Any]:
    if isinstance(part, str):
        return "text", part
    return (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (part, None)
