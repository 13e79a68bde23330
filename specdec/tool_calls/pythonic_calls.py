"""Tool calls as a list of Python's calls."""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.tool_calls.tagged_calls import SteppedParser
from specdec.tool_calls.tool_call_reader import CallArguments, CallStart, argument_text

_LIST = re.compile(r"\s*\[\s*[^\W\d][\w.]*\(")
# What may still become one.
_BEGUN = re.compile(r"\s*(\[\s*([^\W\d][\w.]*)?)?")
# Values by the words of JSON, too.
_WORDS = {"true": True, "false": False, "null": None}
# Brackets within each other; more would exhaust Python's parser.
_DEEPEST = 50


class PythonicParser(SteppedParser):
    """An answer that is a list of calls, `[f(a=1), g(b="c")]`: Llama 3.2 and others. Any other is text.

    A call is returned as a whole, once its bracket is closed.
    """

    def __init__(self, functions: Sequence[Mapping[str, Any]] = ()) -> None:  # noqa: ARG002
        super().__init__()
        self._is_list: bool | None = None
        self._end = _CallEnd()

    def _step(self, is_end: bool) -> bool:
        if self._is_list:
            return self._read_call(is_end)
        if self._is_list is None:
            if _LIST.match(self._unread):
                self._is_list, self._unread = True, self._unread.lstrip()[1:]
                return True
            if not is_end and _BEGUN.fullmatch(self._unread):
                return False
            self._is_list = False
        if is_end or not (self._is_after_call and self._unread.isspace()):
            self._give(self._unread)
            self._unread = ""
        return False

    def _read_call(self, is_end: bool) -> bool:
        """Read the next call, if it is complete. Behind the list, and at what is no call, text begins."""
        rest = self._unread.lstrip(" \t\r\n" + ("," if self._is_after_call else ""))
        if self._is_after_call and rest.startswith("]"):
            self._is_list, self._unread = False, rest[1:]
            return True
        size = self._end.find(rest)
        if size and (call := _call(rest[:size])):
            self._items += call
            self._end, self._unread, self._is_after_call = _CallEnd(), rest[size:], True
            return True
        if size == 0 and not is_end:
            return False
        # Before a call, the bracket belongs to the text.
        self._is_list, self._unread = False, self._unread if self._is_after_call else "[" + self._unread
        return True


class _CallEnd:
    """Search for the end of the call that a growing text begins with."""

    def __init__(self) -> None:
        self._num_read, self._depth, self._quote, self._is_escaped = 0, 0, "", False

    def find(self, text: str) -> int | None:
        """Return the length of the call, 0 where it is not complete yet, None where it is none.

        Args:
            text: the text of the call before, and what has come since.
        """
        for place in range(self._num_read, len(text)):
            char = text[place]
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
                if self._depth > _DEEPEST:
                    return None
            elif char in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1 if self._depth == 0 else None
            elif self._depth == 0 and not (char.isalnum() or char in "_. "):
                return None
        self._num_read = len(text)
        return 0


def _call(text: str) -> tuple[CallStart, CallArguments] | None:
    """Return the call that a text is, None if it is none, or has values that are no JSON."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            return None
        name = ast.unparse(call.func) if isinstance(call.func, ast.Name | ast.Attribute) else ""
        arguments = argument_text({str(each.arg): _value(each.value) for each in call.keywords})
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return (CallStart(name), CallArguments(arguments)) if name and arguments is not None else None


def _value(node: ast.expr) -> Any:
    """Return the value of an expression.

    Raises:
        ValueError: it is no constant of JSON.
    """
    match node:
        case ast.Constant(str() | int() | float() | None as value):
            return value
        case ast.Name(name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.UnaryOp(ast.UAdd(), ast.Constant(int() | float() as value)):
            return value
        case ast.List(parts) | ast.Tuple(parts):
            return [_value(part) for part in parts]
        case ast.Dict(keys, values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("no constant")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(str() as key):
            return key
    raise ValueError("no key of JSON")
