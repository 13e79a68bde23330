"""A tool call read as it is generated: its name first, then its arguments in pieces."""

import json
import re
from typing import NamedTuple

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class CallStart(NamedTuple):
    """The beginning of a call: the function's name."""

    name: str


class CallArguments(NamedTuple):
    """The next piece of a call's arguments, as JSON text."""

    text: str


CallPiece = CallStart | CallArguments


class CallReader:
    """Reads a JSON object such as `{"name": ..., "arguments": {...}}`, if its keys have this order.

    Attributes:
        unread: text that is not part of a call: all of it before a call has begun, what follows once it has ended.
        has_begun, has_ended: whether the name is read, and whether the object is closed. `<` outside of a string is no
            JSON, so it ends an object that the model forgot to close.
    """

    def __init__(self) -> None:
        self.unread = ""
        self.has_begun = self.has_ended = False
        # Open braces and brackets, that of the call included.
        self._depth = 1
        self._in_arguments = True
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> list[CallPiece]:
        """Take new text; return the pieces of the call in it."""
        if self.has_ended or not self.has_begun:
            self.unread += text
        if self.has_ended:
            return []
        pieces: list[CallPiece] = []
        if not self.has_begun:
            head = _HEAD.match(self.unread)
            name = _loaded(head[1]) if head else None
            if head is None or name is None:
                return []
            self.has_begun, text, self.unread = True, self.unread[head.end() :], ""
            pieces.append(CallStart(name))
        arguments = self._scan(text)
        return [*pieces, CallArguments(arguments)] if arguments else pieces

    def _scan(self, text: str) -> str:
        """Read on in the object; return what belongs to the arguments."""
        end = len(text) if self._in_arguments else 0
        for index, char in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = not self._is_escaped and char == "\\"
                continue
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            is_broken = char == "<"
            if self._in_arguments and (is_broken or self._depth == 1):
                self._in_arguments, end = False, index if is_broken else index + 1
            if is_broken or self._depth == 0:
                self.has_ended, self.unread = True, text[index if is_broken else index + 1 :]
                break
        return text[:end]


def _loaded(text: str) -> str | None:
    """Return the text that a JSON string stands for, None if it is none."""
    try:
        return str(json.loads(text))
    except ValueError:
        return None
