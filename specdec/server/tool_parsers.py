"""Tool calls in the text of an answer, in the forms of Hermes and of Llama 3. Text may come in pieces of any size."""

import json
from collections.abc import Iterator
from typing import Protocol

from specdec.server.replies import FunctionCall

Item = str | FunctionCall


class ToolParser(Protocol):
    """Separates the calls of one answer from its text."""

    def push(self, text: str) -> list[Item]:
        """Take new text; return the text and the calls that are complete, in order."""
        ...

    def finish(self) -> list[Item]:
        """Return the items that are left at the answer's end. An incomplete call is returned as text."""
        ...


class PlainText:
    """An answer without calls."""

    def push(self, text: str) -> list[Item]:
        return [text] if text else []

    def finish(self) -> list[Item]:
        return []


class HermesParser:
    """Calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen and others."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._text = ""
        self._is_inside = self._has_called = False

    def push(self, text: str) -> list[Item]:
        self._text += text
        return list(self._items())

    def _items(self) -> Iterator[Item]:
        while True:
            if self._is_inside:
                body, closed, rest = self._text.partition(self.CLOSE)
                if not closed:
                    return
                yield _call_of(body) or f"{self.OPEN}{body}{self.CLOSE}"
                self._text, self._is_inside, self._has_called = rest, False, True
            else:
                before, opened, rest = self._text.partition(self.OPEN)
                if not opened:
                    kept = _held_back(self._text, self.OPEN)
                    before, self._text = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
                    yield from self._plain(before)
                    return
                yield from self._plain(before.rstrip())
                self._text, self._is_inside = rest, True

    def _plain(self, text: str) -> Iterator[Item]:
        """Text, without the white space around calls."""
        if text and not (self._has_called and text.isspace()):
            yield text

    def finish(self) -> list[Item]:
        text, self._text = self._text, ""
        if self._is_inside:
            return [_call_of(text) or self.OPEN + text]
        return list(self._plain(text))


class LlamaParser:
    """Calls as `{"name": ..., "parameters": {...}}`, the whole answer, several separated by semicolons: Llama 3."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._text = ""
        self._is_plain = self._has_called = False

    def push(self, text: str) -> list[Item]:
        if self._is_plain:
            return [text] if text else []
        self._text += text
        rest = self._rest()
        if not rest or self.TAG.startswith(rest):
            return []
        if not rest.startswith("{"):
            return self._give_up()
        # Only a brace can complete a call.
        return list(self._calls()) if "}" in text else []

    def _rest(self) -> str:
        """Return the text that is left, from where a call may begin."""
        separators = "; \n\t\r" if self._has_called else " \n\t\r"
        return self._text.lstrip(separators).removeprefix(self.TAG).lstrip()

    def _calls(self) -> Iterator[Item]:
        while (rest := self._rest()).startswith("{"):
            try:
                body, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                return
            call = _as_call(body)
            if call is None:
                yield from self._give_up()
                return
            yield call
            self._text, self._has_called = rest[end:], True

    def _give_up(self) -> list[Item]:
        """Return all that was held back; the answer is text from here on."""
        self._is_plain, text, self._text = True, self._text, ""
        return [text]

    def finish(self) -> list[Item]:
        is_empty, text, self._text = self._has_called and not self._rest(), self._text, ""
        return [text] if text and not is_empty else []


def parser_for(choice: str, template: str) -> type[ToolParser]:
    """Return the parser of a setting's name.

    Args:
        template: text of the model's chat template, by which "auto" recognises the form.
    """
    if choice == "auto":
        is_llama = "python_tag" in template or '"parameters"' in template
        choice = "hermes" if HermesParser.OPEN in template else "llama3_json" if is_llama else "none"
    parsers: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": LlamaParser, "none": PlainText}
    return parsers[choice]


def _held_back(text: str, marker: str) -> int:
    """Return the length of the text's end that may begin a marker, with the white space before it."""
    most = min(len(text), len(marker) - 1)
    size = next((size for size in range(most, 0, -1) if marker.startswith(text[-size:])), 0)
    rest = text[: len(text) - size]
    return size + len(rest) - len(rest.rstrip())


def _call_of(text: str) -> FunctionCall | None:
    try:
        return _as_call(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _as_call(body: object) -> FunctionCall | None:
    """Return the call that a JSON value describes, None if it describes none."""
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        return None
    arguments = body.get("arguments", body.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    return FunctionCall(body["name"], json.dumps(arguments, ensure_ascii=False))
