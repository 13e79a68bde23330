"""Validation of JSON schemas: invalid ones, and keywords that our grammars cannot follow, are refused. Pure Python."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from math import isfinite
from typing import Any
from urllib.parse import unquote

from specdec.json_schema.keywords import APPLICATORS, BESIDE, CONSTRAINTS, FINITE, FORMATS, REFUSED, TYPES, VALUES


class SchemaError(ValueError):
    """An invalid schema, or a keyword that is not supported.

    Args:
        place: where, as a JSON pointer.
        problem: what, and the remedy.
    """

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"at {place or '/'!r:.80}, {problem}")


class Schema:
    """A JSON schema, checked.

    Raises:
        SchemaError: see `specdec.json_schema.keywords`.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._checked = {"#"}
        self._check("", root)

    def referred(self, reference: str, place: str) -> Any:
        """Return the schema that a reference names, checked.

        Args:
            place: that of the reference.
        """
        found = referred_part(self.root, reference)
        if found is None:
            raise SchemaError(place, f"$ref is {reference!r:.50}, which is not there; correct it")
        if reference not in self._checked:
            self._checked.add(reference)
            self._check(unquote(reference[1:]), found)
        return found

    def _check(self, place: str, schema: Any) -> None:
        for where, part in _parts(place, schema):
            problem = _invalid(part) or _problem(part, is_root=part is self.root)
            if problem:
                raise SchemaError(where, problem)


def referred_part(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference, `#` and a JSON pointer, names; None if it is not there."""
    found = root
    for part in unquote(reference).removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    return is_number(value) and value == value // 1


def declared_types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the value of `type`; all types if there is none."""
    types = schema.get("type", TYPES)
    return (types,) if isinstance(types, str) else tuple(types)


def _invalid(schema: Any) -> str | None:
    """Return why a schema is invalid; None if it is valid."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, Mapping):
        return f"there is {schema!r:.50}; a schema is an object, true or false"
    for keyword, value in schema.items():
        kind = VALUES.get(keyword)
        if kind and not _KINDS[kind](value):
            return f"{keyword} is {value!r:.50}; it must be {kind}"
    return None


def _is_finite(value: Any) -> bool:
    # A whole number may be larger than any float.
    return is_number(value) and (isinstance(value, int) or isfinite(value))


def _is_pattern(value: Any) -> bool:
    try:
        # A bracket that a later Python may read as a set of sets.
        with warnings.catch_warnings(action="ignore"):
            re.compile(value)
    except (TypeError, re.error, OverflowError):
        return False
    return True


def _is_types(value: Any) -> bool:
    types = [value] if isinstance(value, str) else value
    return isinstance(types, list) and 0 < len(types) == len({str(each) for each in types if each in TYPES})


def _is_different_texts(value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return is_list and len(value) == len(set(value))


# Whether a value is of a kind, by the words of `VALUES`.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "a number": _is_finite,
    "a number above 0": lambda value: _is_finite(value) and value > 0,
    "a whole number, at least 0": lambda value: _is_finite(value) and is_whole(value) and value >= 0,
    "a regular expression that Python's re reads too": _is_pattern,
    "a JSON type or a list of them": _is_types,
    "a list of different texts": _is_different_texts,
    "a list": lambda value: isinstance(value, list),
    "a schema": lambda value: isinstance(value, bool | Mapping),
    "a list of at least one schema": lambda value: isinstance(value, list) and bool(value),
    "an object of schemas": lambda value: isinstance(value, Mapping),
    "an object of schemas by regular expressions that Python's re reads too": (
        lambda value: isinstance(value, Mapping) and all(map(_is_pattern, value))
    ),
}


def _problem(schema: Any, *, is_root: bool) -> str | None:
    """Return what of a valid schema is not followed, and the remedy."""
    if isinstance(schema, bool):
        return None
    for keyword, remedy in REFUSED.items():
        if keyword in schema and schema[keyword] is not False:
            return f"{keyword!r} is not supported; {remedy}"
    if "$id" in schema and not is_root:
        return "'$id' within a schema is not supported; leave it out"
    reference = schema.get("$ref", "#")
    if not re.match(r"#(/|$)", reference):
        return f"$ref is {reference!r:.50}; only references within the schema, '#/…', are supported"
    if any(keyword in schema for keyword in FINITE):
        return None
    whole = [keyword for keyword in APPLICATORS if keyword in schema]
    beside = [keyword for keyword in schema if keyword in CONSTRAINTS]
    if whole and beside:
        return f"{beside[0]!r} beside {whole[0]!r} is not supported; move it into the schemas of {whole[0]!r}"
    if len(whole) > 1:
        return f"{whole[1]!r} beside {whole[0]!r} is not supported; keep one of them"
    if len(schema.get("allOf", [])) > 1:
        return "'allOf' with several schemas is not supported; write them as one"
    for (one, other), remedy in BESIDE.items():
        if one in schema and other in schema:
            return f"{one!r} beside {other!r} is not supported; {remedy}"
    if "format" in schema and "string" in declared_types(schema) and schema["format"] not in FORMATS:
        return f"format is {schema['format']!r:.50}; supported are {', '.join(FORMATS)}"
    return None


def _parts(place: str, schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield a schema and all schemas in it, each with its place as a JSON pointer."""
    yield place, schema
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        kind = VALUES.get(keyword, "")
        if kind == "a schema":
            yield from _parts(f"{place}/{keyword}", value)
        elif kind == "a list of at least one schema":
            for index, part in enumerate(value):
                yield from _parts(f"{place}/{keyword}/{index}", part)
        elif kind.startswith("an object of schemas"):
            for name, part in value.items():
                yield from _parts(f"{place}/{keyword}/{name}", part)


def shared_types(types: frozenset[str], others: Iterable[str]) -> frozenset[str]:
    """Return types that both have. A whole number is a number."""
    found = types & frozenset(others)
    if "number" in types and "integer" in others and "number" not in found:
        found |= {"integer"}
    if "integer" in types and "number" in others:
        found |= {"integer"}
    return found - {"integer"} if "number" in found else found
