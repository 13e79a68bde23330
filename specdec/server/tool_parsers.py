"""Tool calls in the text of an answer, in the forms of Hermes and of Llama 3. Text may come in pieces of any size."""

import json
from collections.abc import Iterator, Sequence
from typing import Protocol

from specdec.server.tool_call_reader import CallArguments, CallPiece, CallReader, CallStart

Item = str | CallPiece


class ToolParser(Protocol):
    """Separates the calls of one answer from its text."""

    def push(self, text: str) -> list[Item]:
        """Take new text; return the text and the pieces of calls that it holds, in order."""
        ...

    def finish(self) -> list[Item]:
        """Return the items that are left at the answer's end. A call whose name is incomplete is returned as text."""
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
        self._call: CallReader | None = None
        self._has_called = False

    def push(self, text: str) -> list[Item]:
        return list(self._items(text))

    def _items(self, text: str) -> Iterator[Item]:
        while True:
            if self._call is None:
                before, opened, text = (self._text + text).partition(self.OPEN)
                if not opened:
                    kept = _held_back(before, self.OPEN)
                    self._text = before[len(before) - kept :]
                    yield from self._plain(before[: len(before) - kept])
                    return
                yield from self._plain(before.rstrip())
                self._text, self._call = "", CallReader()
            yield from self._call.push(text)
            body, closed, text = self._call.unread.partition(self.CLOSE)
            if not closed:
                return
            if not self._call.has_begun:
                yield from _whole_call(body) or [f"{self.OPEN}{body}{self.CLOSE}"]
            self._call, self._has_called = None, True

    def _plain(self, text: str) -> Iterator[Item]:
        """Text, without the white space around calls."""
        if text and not (self._has_called and text.isspace()):
            yield text

    def finish(self) -> list[Item]:
        text, self._text = self._text, ""
        if self._call is None:
            return list(self._plain(text))
        if self._call.has_begun:
            return []
        return list(_whole_call(self._call.unread) or [self.OPEN + self._call.unread])


class LlamaParser:
    """Calls as `{"name": ..., "parameters": {...}}`, the whole answer, several separated by semicolons: Llama 3."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        # Text that is not returned yet, that of a call that has not begun included.
        self._text = ""
        self._call: CallReader | None = None
        self._is_plain = self._has_called = False

    def push(self, text: str) -> list[Item]:
        return list(self._items(text))

    def _items(self, text: str) -> Iterator[Item]:
        if self._is_plain:
            yield from [text] if text else []
            return
        self._text += text
        while True:
            if self._call is None:
                text = self._rest()
                if not text or self.TAG.startswith(text):
                    return
                if not text.startswith("{"):
                    yield from self._give_up()
                    return
                self._call = CallReader()
            yield from self._call.push(text)
            if self._call.has_begun:
                self._text = self._call.unread
                if not self._call.has_ended:
                    return
            elif "}" in text:
                # Only a brace can complete a call.
                yield from self._take_whole(self._call.unread)
                if self._is_plain or self._call is not None:
                    return
            else:
                return
            self._call, self._has_called = None, True

    def _take_whole(self, unread: str) -> Iterator[Item]:
        """Return a call whose keys have another order, once it is complete; give up on another object."""
        try:
            body, end = json.JSONDecoder().raw_decode(unread)
        except (ValueError, RecursionError):
            return
        call = _pieces(body)
        if call:
            yield from call
            self._text, self._call = unread[end:], None
        else:
            yield from self._give_up()

    def _rest(self) -> str:
        """Return the text that is left, from where a call may begin."""
        separators = "; \n\t\r" if self._has_called else " \n\t\r"
        return self._text.lstrip(separators).removeprefix(self.TAG).lstrip()

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


def _whole_call(text: str) -> Sequence[Item]:
    """Return the pieces of the call that a text describes, none if it describes none."""
    try:
        return _pieces(json.loads(text))
    except (ValueError, RecursionError):
        return []


def _pieces(body: object) -> Sequence[Item]:
    """Return the pieces of the call that a JSON value describes, none if it describes none."""
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        return []
    arguments = body.get("arguments", body.get("parameters"))
    if not isinstance(arguments, dict):
        return []
    return [CallStart(body["name"]), CallArguments(json.dumps(arguments, ensure_ascii=False))]
