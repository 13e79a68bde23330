"""Tool calls in tags for the function and each of its parameters."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from specdec.core.call_forms import HERMES
from specdec.json_schema.keywords import MEANT, TYPES
from specdec.json_schema.schema import is_type, referred_part
from specdec.tool_calls.tagged_calls import SteppedParser, begun_tag
from specdec.tool_calls.tool_call_reader import CallArguments, CallStart

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_LONGEST_NAME = 200


class Qwen3CoderParser(SteppedParser):
    """Calls as `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder.

    A value is text. It becomes JSON by its type in the function's schema, and is returned once it is complete.
    """

    TAGS: ClassVar[tuple[str, ...]] = (HERMES.opening, HERMES.closing)

    def __init__(self, functions: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self._schemas = {each.get("name"): each.get("parameters") for each in functions}
        # The function that is being called, and the number of its parameters so far.
        self._name: str | None = None
        self._num_parameters = 0

    def _step(self, is_end: bool) -> bool:
        return self._in_text(is_end) if self._name is None else self._in_function(is_end)

    def _in_text(self, is_end: bool) -> bool:
        """Read text up to the next call; return whether one begins."""
        if self._is_after_call:
            rest = self._unread.lstrip()
            if HERMES.closing.startswith(rest) and rest != HERMES.closing and not is_end:
                return False
            self._unread = rest.removeprefix(HERMES.closing) if rest.startswith(HERMES.closing) else self._unread
        place = self._unread.find(_FUNCTION)
        if place < 0:
            kept = 0 if is_end else self._held_back()
            end = len(self._unread) - kept
            self._give(self._unread[:end])
            self._unread = self._unread[end:]
            return False
        before, rest = self._unread[:place], self._unread[place + len(_FUNCTION) :]
        name, bracket, behind = rest.partition(">")
        if not bracket and len(rest) <= _LONGEST_NAME and not is_end:
            return False
        if not bracket or not name.strip() or "\n" in name or "<" in name:
            self._give(before + _FUNCTION)
            self._unread = rest
            return True
        self._give(before.rstrip().removesuffix(HERMES.opening).rstrip())
        self._name, self._num_parameters, self._unread = name.strip(), 0, behind
        self._items.append(CallStart(self._name))
        return True

    def _held_back(self) -> int:
        """Return the length of the text's end that may belong to a call: its tags, and white space before them."""
        text = self._unread
        size = begun_tag(text, _FUNCTION)
        rest = text[: len(text) - size].rstrip()
        is_open = rest.endswith(HERMES.opening)
        opening = len(HERMES.opening) if is_open else 0 if size else begun_tag(rest, HERMES.opening)
        rest = rest[: len(rest) - opening]
        return len(text) - len(rest.rstrip())

    def _in_function(self, is_end: bool) -> bool:
        """Read a parameter or the call's end; return whether it was complete."""
        rest = self._unread.lstrip()
        if rest.startswith(_PARAMETER):
            key, bracket, behind = rest.removeprefix(_PARAMETER).partition(">")
            value, tag, after = behind.partition(_PARAMETER_END)
            next_one = value.find("\n" + _PARAMETER)
            # The model may forget to close a parameter.
            if bracket and next_one >= 0:
                value, tag, after = value[:next_one], "\n", behind[next_one + 1 :]
            elif bracket and not tag and is_end and _FUNCTION_END in behind:
                value, tag, after = behind.partition(_FUNCTION_END)
                after = tag + after
            if not tag:
                self._unread = "" if is_end else self._unread
                return False
            self._add_parameter(key.strip(), value)
            self._unread = after
            return True
        if not is_end and (_PARAMETER.startswith(rest) or _FUNCTION_END.startswith(rest)) and rest != _FUNCTION_END:
            return False
        if is_end and not rest.startswith(_FUNCTION_END):
            # The answer was cut off within the call.
            self._give_arguments("" if self._num_parameters else "{")
            self._unread = ""
            return False
        self._give_arguments("}" if self._num_parameters else "{}")
        self._unread = rest.removeprefix(_FUNCTION_END)
        self._name, self._is_after_call = None, True
        return True

    def _give_arguments(self, text: str) -> None:
        if text:
            self._items.append(CallArguments(text))

    def _add_parameter(self, key: str, text: str) -> None:
        root = self._schemas.get(self._name)
        value = _value(text.removeprefix("\n").removesuffix("\n"), _types(_properties(root).get(key), root))
        start = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self._give_arguments(f"{start}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}")


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _value(text: str, types: set[str]) -> Any:
    """Return a parameter's value: its text where its types allow a string, else the JSON value that it spells."""
    if "null" in types and text.strip().lower() in ("null", "none"):
        return None
    if not types or "string" in types:
        return text
    if text.strip() in ("True", "False"):
        return text.strip() == "True"
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def _types(schema: Any, root: Any, known: dict[str, set[str] | None] | None = None) -> set[str]:
    """Return the JSON types that a schema names, directly or by other keywords; none where it names none.

    Args:
        root: the schema that references begin at.
        known: types of references; None for one that has led here.
    """
    known = {} if known is None else known
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    if found := {each for each in (own if isinstance(own, list) else [own]) if isinstance(each, str)}:
        return found
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    found = {kind for kind in TYPES if any(is_type(value, kind) for value in values)}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = None
            known[reference] = _types(referred_part(root, reference), root, known)
        found |= known[reference] or set()
    for key in ("allOf", "anyOf", "oneOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            own = _types(part, root, known)
            # An alternative that names no type allows a string; one that leads back here allows what others do.
            leads_back = isinstance(part, Mapping) and known.get(str(part.get("$ref")), own) is None
            found |= own or (set() if key == "allOf" or leads_back else {"string"})
    return found or {MEANT[keyword] for keyword in schema if keyword in MEANT}
