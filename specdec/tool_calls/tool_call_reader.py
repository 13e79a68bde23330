"""A tool call read as it is generated: its name first, then its arguments in pieces."""

import json
import re
from collections.abc import Container, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeGuard

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
# Keys that a call without arguments may have; an object with others is rather an answer in JSON.
_PLAIN_KEYS = {"name", "type", "id", "arguments", "parameters"}


class CallStart(NamedTuple):
    """The beginning of a call: the function's name."""

    name: str


class CallArguments(NamedTuple):
    """The next piece of a call's arguments, as JSON text."""

    text: str


CallPiece = CallStart | CallArguments


class Reading(Enum):
    """State of a text that may be a tool call.

    Attributes:
        OPEN: undecided, or a call that is not complete.
        CALL: a complete call.
        OBJECT: a complete object that is no call.
        BROKEN: no object.
    """

    OPEN = 0
    CALL = 1
    OBJECT = 2
    BROKEN = 3


class CallReader:
    """Reads an object such as `{"name": ..., "arguments": {...}}` from a text that begins with its brace.

    Where the keys have this order and the arguments are an object, pieces are returned as they come, and otherwise the
    whole call at its end.

    Args:
        names: functions of which a call may have no arguments; None for all.

    Attributes:
        reading: what the text is, as far as it is read.
        has_begun: whether a piece of a call was returned.
        unread: text that belongs to no call: all of it until one begins; after a call, what follows it. Behind a call
            that is not complete, keys after its arguments.
    """

    def __init__(self, names: Container[str] | None = None) -> None:
        self._names = names
        self.unread = ""
        self.reading = Reading.OPEN
        self.has_begun = False
        self._in_arguments = False
        self._brackets = _Brackets()

    def push(self, text: str) -> list[CallPiece]:
        """Take new text; return the pieces of the call in it."""
        self.unread += text
        pieces = [] if self.has_begun else self._begin()
        if self._in_arguments:
            pieces += self._arguments()
        if self.has_begun and not self._in_arguments and self.reading is Reading.OPEN:
            self._close()
        return pieces

    def take_object(self) -> str:
        """Remove the text of a complete object that is no call; return it."""
        text, self.unread = self.unread[: self._brackets.num_read], self.unread[self._brackets.num_read :]
        return text

    def _begin(self) -> list[CallPiece]:
        head = _HEAD.match(self.unread)
        name = json_value(head[1]) if head else None
        if head is not None and _is_name(name):
            self.has_begun = self._in_arguments = True
            self.unread = self.unread[head.end() :]
            self._brackets = _Brackets()
            return [CallStart(name)]
        self._brackets.read(self.unread)
        if self._brackets.is_broken:
            self.reading = Reading.BROKEN
        elif self._brackets.is_closed:
            call = _pieces(json_value(self.unread[: self._brackets.num_read]), self._names)
            self.reading = Reading.CALL if call else Reading.OBJECT
            if call:
                self.has_begun = True
                self.take_object()
            return list(call)
        return []

    def _arguments(self) -> list[CallPiece]:
        """Return what belongs to the arguments.

        They are not checked, but `<` outside of a string ends them, and control characters in a string are escaped.
        """
        self._brackets.num_read = 0
        self._brackets.controls.clear()
        self._brackets.read(self.unread, strict=False)
        if self._brackets.is_broken:
            self.reading = Reading.CALL
        self._in_arguments = not (self._brackets.is_broken or self._brackets.is_closed)
        text, parts, start = self.take_object(), list[str](), 0
        for place, is_escaped in self._brackets.controls:
            # Of an escape, the backslash is there already.
            parts += [text[start:place], json.dumps(text[place])[1 + is_escaped : -1]]
            start = place + 1
        text = "".join([*parts, text[start:]])
        return [CallArguments(text)] if text else []

    def _close(self) -> None:
        """Read on behind the arguments to the end of the call."""
        rest = self.unread.lstrip()
        if not rest:
            return
        if rest[0] == ",":
            # Further keys are no part of a call; what does not end as an object does is text.
            brackets = _Brackets(depth=1)
            brackets.read(rest)
            if not (brackets.is_closed or brackets.is_broken):
                return
            rest = rest[brackets.num_read :] if brackets.is_closed else self.unread
        else:
            # Without a brace, the model forgot to close the call.
            rest = rest[1:] if rest[0] == "}" else self.unread
        self.reading, self.unread = Reading.CALL, rest


class _Brackets:
    """Reads a JSON object up to its last bracket, by brackets and strings only.

    Attributes:
        num_read: number of characters read.
        is_closed: whether the last bracket is read.
        is_broken: whether the next character shows that this is no JSON: `<`, or a line's end in a string.
        controls: places of control characters in strings, such as a line's end, and whether a backslash escapes them.
    """

    def __init__(self, depth: int = 0) -> None:
        self.num_read = 0
        self.controls: list[tuple[int, bool]] = []
        self.is_closed = self.is_broken = False
        self._depth = depth
        self._in_string = self._is_escaped = False

    def read(self, text: str, strict: bool = True) -> None:
        """Read on in a text, from `num_read`.

        Args:
            strict: whether a line's end in a string is no JSON.
        """
        while self.num_read < len(text) and not (self.is_closed or self.is_broken):
            char = text[self.num_read]
            if self._in_string:
                self.is_broken = strict and char in "\r\n"
                if char < " ":
                    self.controls.append((self.num_read, self._is_escaped))
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = not self._is_escaped and char == "\\"
            else:
                self.is_broken = char == "<"
                self._in_string = char == '"'
                self._depth += (char in "{[") - (char in "}]")
                self.is_closed = self._depth == 0
            self.num_read += not self.is_broken


def json_value(text: str) -> Any:
    """Return the value of a JSON text, None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value) and _has_utf8(value)


def _has_utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _pieces(body: Any, names: Container[str] | None) -> Sequence[CallPiece]:
    """Return the pieces of the call that a JSON value describes, none if it describes none."""
    if not isinstance(body, dict) or not _is_name(body.get("name")):
        return []
    arguments = next((body[key] for key in ("arguments", "parameters") if body.get(key) is not None), None)
    if arguments is None and not (body.keys() <= _PLAIN_KEYS and (names is None or body["name"] in names)):
        return []
    text = argument_text(arguments)
    return [] if text is None else [CallStart(body["name"]), CallArguments(text)]


def argument_text(arguments: Any) -> str | None:
    """Return arguments as the JSON text of an object, None if they are none, or hold a number that JSON does not have.

    Models that have seen OpenAI's API write them as a JSON text in a string.
    """
    if arguments is None:
        return "{}"
    value = arguments
    if isinstance(arguments, str):
        value = json_value(arguments) if arguments.strip() else {}
        if isinstance(value, dict) and value and _has_utf8(arguments):
            return arguments
        value = {} if arguments.strip() == "null" else value
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    return text if _has_utf8(text) else json.dumps(value)
