"""Checks of values by a JSON schema, and of schemas that no value follows together. Pure Python."""

import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from specdec.json_schema.keywords import FINITE, FORMATS
from specdec.json_schema.patterns import literal_start
from specdec.json_schema.schema import Schema, SchemaError, declared_types, is_number, is_whole


def same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. `true` is not 1; 1 and 1.0 are."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "number": is_number,
    "integer": is_whole,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, Mapping),
}


def is_type(value: Any, kind: str) -> bool:
    """Return whether a value has a JSON type."""
    return _TYPES[kind](value)


class Values:
    """Checks of values by the parts of one schema."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def listed(self, part: Mapping[str, Any]) -> list[Any] | None:
        """Return the values that a schema lists and that its other keywords allow; None if it lists none."""
        if not any(keyword in part for keyword in FINITE):
            return None
        if "enum" not in part:
            return [part["const"]] if self.follows(part["const"], part) else []
        others = {keyword: value for keyword, value in part.items() if keyword != "enum"}
        return [value for value in part["enum"] if self.follows(value, others)]

    def follows(self, value: Any, part: Any) -> bool:
        """Return whether a value follows a schema, by all keywords that are not refused."""
        if isinstance(part, bool):
            return part
        if not any(is_type(value, kind) for kind in declared_types(part)):
            return False
        if "const" in part and not same(value, part["const"]):
            return False
        if "enum" in part and not any(same(value, each) for each in part["enum"]):
            return False
        if "$ref" in part and not self.follows(value, self._schema.referred(part["$ref"], "")):
            return False
        if "anyOf" in part and not any(self.follows(value, each) for each in part["anyOf"]):
            return False
        if "oneOf" in part and sum(self.follows(value, each) for each in part["oneOf"]) != 1:
            return False
        if not all(self.follows(value, each) for each in part.get("allOf", [])):
            return False
        if is_number(value):
            return _number_follows(value, part)
        if isinstance(value, str):
            return _text_follows(value, part)
        if isinstance(value, list):
            return self._list_follows(value, part)
        return not isinstance(value, Mapping) or self._object_follows(value, part)

    def _list_follows(self, value: list[Any], part: Mapping[str, Any]) -> bool:
        first, rest = part.get("prefixItems", []), part.get("items", part.get("unevaluatedItems", True))
        return (
            part.get("minItems", 0) <= len(value) <= part.get("maxItems", len(value))
            and all(self.follows(item, schema) for item, schema in zip(value, first, strict=False))
            and all(self.follows(item, rest) for item in value[len(first) :])
        )

    def _object_follows(self, value: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
        if not part.get("minProperties", 0) <= len(value) <= part.get("maxProperties", len(value)):
            return False
        if not all(key in value for key in part.get("required", [])):
            return False
        rest = part.get("additionalProperties", part.get("unevaluatedProperties", True))
        for key, each in value.items():
            schemas = [part["properties"][key]] if key in part.get("properties", {}) else []
            schemas += [schema for regex, schema in part.get("patternProperties", {}).items() if re.search(regex, key)]
            if not all(self.follows(each, schema) for schema in schemas or [rest]):
                return False
        return all(self.follows(key, part.get("propertyNames", True)) for key in value)

    def exclude(self, one: Any, other: Any) -> bool:
        """Return whether it is seen that no value follows both schemas."""
        return self._exclude(one, other, frozenset())

    def _exclude(self, one: Any, other: Any, seen: frozenset[str]) -> bool:
        for part, rest in ((one, other), (other, one)):
            if isinstance(part, bool):
                if not part:
                    return True
                continue
            values = self.listed(part)
            if values is not None:
                return not any(self.follows(value, rest) for value in values)
            for options in (part.get("anyOf"), part.get("oneOf")):
                if options and all(self._exclude(option, rest, seen) for option in options):
                    return True
            if "allOf" in part and any(self._exclude(each, rest, seen) for each in part["allOf"]):
                return True
            reference = part.get("$ref")
            if reference and reference not in seen:
                referred = self._schema.referred(reference, "")
                if self._exclude(referred, rest, seen | {reference}):
                    return True
        if isinstance(one, bool) or isinstance(other, bool):
            return False
        shared = [a for a in declared_types(one) for b in declared_types(other) if a == b or {a, b} == _NUMBERS]
        if not set(shared) - _NUMBERS - {"object"}:
            no_number = not set(shared) & _NUMBERS or _are_apart(one, other)
            return no_number and ("object" not in shared or self._objects_exclude(one, other, seen))
        return False

    def _objects_exclude(self, one: Mapping[str, Any], other: Mapping[str, Any], seen: frozenset[str]) -> bool:
        for part, rest in ((one, other), (other, one)):
            for key in part.get("required", []):
                mine, theirs = (each.get("properties", {}).get(key) for each in (part, rest))
                if theirs is None:
                    is_closed = rest.get("additionalProperties", rest.get("unevaluatedProperties")) is False
                    if is_closed and not rest.get("patternProperties"):
                        return True
                elif mine is not None and self._exclude(mine, theirs, seen):
                    return True
        return False


_NUMBERS = {"integer", "number"}


def _are_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the greatest number of one schema is below the least of the other."""
    for low, high in ((one, other), (other, one)):
        tops = [low[keyword] for keyword in ("maximum", "exclusiveMaximum") if keyword in low]
        ends = [high[keyword] for keyword in ("minimum", "exclusiveMinimum") if keyword in high]
        if tops and ends:
            top, end = min(tops), max(ends)
            is_open = low.get("exclusiveMaximum") == top or high.get("exclusiveMinimum") == end
            if top < end or (top == end and is_open):
                return True
    return False


def _number_follows(value: float, part: Mapping[str, Any]) -> bool:
    if ("minimum" in part and value < part["minimum"]) or ("maximum" in part and value > part["maximum"]):
        return False
    if "exclusiveMinimum" in part and value <= part["exclusiveMinimum"]:
        return False
    if "exclusiveMaximum" in part and value >= part["exclusiveMaximum"]:
        return False
    divisor = part.get("multipleOf")
    if divisor is None:
        return True
    # By the decimal digits and as floats: a value that the two see differently is left out.
    if (Fraction(repr(value)) / Fraction(repr(divisor))).denominator > 1:
        return False
    return isinstance(divisor, int) or (abs(value) < 1e300 and (value / divisor) % 1 == 0)


def _text_follows(value: str, part: Mapping[str, Any]) -> bool:
    if not part.get("minLength", 0) <= len(value) <= part.get("maxLength", len(value)):
        return False
    # An unknown format is no constraint.
    form = FORMATS.get(part.get("format", ""))
    if form is not None and not re.fullmatch(form, value, re.ASCII):
        return False
    return "pattern" not in part or bool(re.search(part["pattern"], value))


def check_patterns(patterns: Iterable[str], names: Iterable[str], place: str) -> None:
    """Refuse names of `properties` and `patternProperties` that may have two schemas.

    Raises:
        SchemaError: a pattern matches such a name, or may match what another one matches.
    """
    starts: list[str] = []
    for pattern in patterns:
        for name in names:
            if re.search(pattern, name):
                problem = f"'patternProperties' {pattern!r:.50} matches {name!r:.50} of 'properties'"
                raise SchemaError(place, f"{problem}, which is not supported; take it out of one of them")
        start = literal_start(pattern)
        if any(start.startswith(other) or other.startswith(start) for other in starts):
            remedy = "write one, or begin each with '^' and a text of its own"
            raise SchemaError(place, f"'patternProperties' that may match the same name are not supported; {remedy}")
        starts.append(start)
