"""JSON schemas: what is none, or what no grammar follows, is refused by its place; the rest is written as llguidance
follows it. Pure Python.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import quote, unquote

from specdec.json_schema.keywords import FORMATS, MEANT, REFUSED, TYPES, VALUES

# Keywords by which several schemas hold for one value.
_JOINING = ("$ref", "anyOf", "oneOf", "allOf")
# Keywords that name properties, and those that say which others an object may have.
_NAMING, _OTHERS = ("properties", "patternProperties"), ("additionalProperties", "unevaluatedProperties")
# Largest count that llguidance (1.9) reads.
_MOST_REPEATED = (1 << 31) - 1
# Largest multipleOf without its decimal point, and most decimal places: llguidance (1.9) takes half a minute for
# 700,000.
_MOST_MULTIPLE, _MOST_PLACES = 10_000, 9
# Decimal places of a number with bounds, or as many as they have.
_FEWEST_PLACES = 6
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Numbers of 64 bits, and the largest of them that is a float.
_BEYOND = 1 << 63
_LARGEST = _BEYOND - 1024
# A set of characters in a regular expression, and what may only look like one; and what Rust reads in it as operations.
_SETS = re.compile(r"\\.|(\[\^?)((?:\\.|[^\]\\])*+)(\]?)", re.DOTALL)
_OPERATORS = re.compile(r"(?<!\\)[\[&~]|(?<=-)-")


class SchemaError(ValueError):
    """An invalid schema, or a keyword that is not supported.

    Args:
        place: where, as a JSON pointer.
        problem: what, and the remedy.
    """

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"at {place or '/'!r:.80}, {problem}")


def followed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in the form that llguidance follows.

    Formats become patterns. Objects with `properties` have no others, unless the schema says which, or joins schemas.

    Raises:
        SchemaError: it is no schema of draft 2020-12, or has a keyword that is not followed.
        RecursionError: it is nested too deeply.
    """
    return _Schema(schema).followed


def json_rule(schema: Mapping[str, Any], *, in_one_line: bool) -> str:
    """Return what stands for JSON by a schema in a grammar of Lark's form.

    Args:
        in_one_line: with one space after each comma and colon; otherwise blanks and line ends may stand between.
    """
    blanks = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False} if in_one_line else {}
    # A free name could spell that of a property in another way. Values of the schema may need such escapes.
    is_open = _is_open(schema) and "\\u00" not in json.dumps(schema)
    options = {**blanks, "json_allowed_escapes": 'nrbtf\\"'} if is_open else blanks
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _is_open(part: Any) -> bool:
    """Return whether an object may have other properties beside those that it names, somewhere in a schema."""
    if isinstance(part, list):
        return any(map(_is_open, part))
    if not isinstance(part, Mapping):
        return False
    names_some = bool(part.get("properties")) and part.get("additionalProperties", True) is not False
    return names_some or any(map(_is_open, part.values()))


def json_text(text: str) -> str:
    """Return a text as JSON writes it, with its quotes. Non-ASCII characters stay as they are."""
    written = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(char):04x}" if 0xD800 <= ord(char) <= 0xDFFF else char for char in written)


def plain_sets(pattern: str) -> str:
    """Return a regular expression whose sets of characters have no operations, as Rust's have: `[a&&b]`, `[a[b]]`."""

    def escaped(found: re.Match[str]) -> str:
        return found[0] if not found[3] else found[1] + _OPERATORS.sub(r"\\\g<0>", found[2]) + "]"

    return _SETS.sub(escaped, pattern)


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


def declared_types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the value of `type`; all types if there is none."""
    types = schema.get("type", TYPES)
    return (types,) if isinstance(types, str) else tuple(types)


def is_type(value: Any, kind: str) -> bool:
    """Return whether a value has a JSON type."""
    return _TYPES[kind](value)


class _Schema:
    """A schema that is checked and rewritten part by part."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._multiples: list[tuple[str, Decimal]] = []
        # Whether schemas that name properties hold for one object somewhere, and whether schemas are joined at all.
        self._names_twice = self._joins = False
        # Objects that have the properties that they name, numbers with bounds, objects of several properties, and
        # rewritten parts with references.
        self._closed: list[dict[str, Any]] = []
        self._bounded: list[dict[str, Any]] = []
        self._counted: list[tuple[str, dict[str, Any]]] = []
        self._referring: list[tuple[str, dict[str, Any]]] = []
        self._rewritten: set[int] = set()
        found = self._part("", root)
        assert isinstance(found, dict)
        self._follow_references(found)
        for part in () if self._names_twice else self._closed:
            part["additionalProperties"] = False
        self._check_multiples()
        for place, part in self._counted:
            _check_count_of_names(place, part)
        # A weak model would write digits for ever.
        for part in () if self._joins else self._bounded:
            places = max(_FEWEST_PLACES, *(_places(Decimal(str(part[bound]))) for bound in _BOUNDS if bound in part))
            part["multipleOf"] = 10.0 ** -min(places, _MOST_PLACES)
        self.followed = found

    def _part(self, place: str, schema: Any) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError(place, f"there is {schema!r:.50}; a schema is an object, true or false")
        self._rewritten.add(id(schema))
        found: dict[str, Any] = {}
        for keyword, value in schema.items():
            kind = VALUES.get(keyword)
            if kind and not _KINDS[kind](value):
                raise SchemaError(place, f"{keyword} is {value!r:.50}; it must be {kind}")
            if keyword in ("$schema", "$id"):
                # llguidance would look for a dialect, or read an older one. References begin at the root.
                continue
            if keyword in REFUSED:
                if value is not False or keyword not in ("uniqueItems", "not"):
                    raise SchemaError(place, f"{keyword!r} is not supported; {REFUSED[keyword]}")
            elif kind == "a schema":
                found[keyword] = self._part(f"{place}/{keyword}", value)
            elif kind == "a list of at least one schema":
                found[keyword] = [self._part(f"{place}/{keyword}/{n}", part) for n, part in enumerate(value)]
            elif keyword == "patternProperties":
                parts = {name: self._part(f"{place}/{keyword}/{name}", part) for name, part in value.items()}
                found[keyword] = {plain_sets(name): part for name, part in parts.items()}
            elif keyword == "pattern":
                found[keyword] = plain_sets(value)
            elif kind == "an object of schemas":
                found[keyword] = {name: self._part(f"{place}/{keyword}/{name}", part) for name, part in value.items()}
            elif kind == "a whole number, at least 0":
                _add_count(found, place, keyword, int(value))
            else:
                found[keyword] = _float_bound(place, keyword, value) if kind == "a number" else value
        if "$id" in schema and schema is not self._root:
            raise SchemaError(place, "'$id' within a schema is not supported; leave it out")
        if "$ref" in found:
            self._referring.append((place, found))
        if "multipleOf" in schema:
            self._multiples.append((place, Decimal(str(schema["multipleOf"]))))
        elif "number" in declared_types(schema) and any(bound in schema for bound in _BOUNDS):
            self._bounded.append(found)
        if found.get("minProperties", 0) > 1:
            self._counted.append((place, found))
        self._note_joins(schema)
        _rename_unevaluated(place, found)
        if (names := found.pop("propertyNames", True)) not in (True, {}):
            self._follow_names(place, found, names)
        if "format" in found:
            _follow_format(place, found)
        meant = {MEANT[keyword] for keyword in schema if keyword in MEANT}
        if len(meant) == 1 and not any(keyword in schema for keyword in ("type", "enum", "const")):
            found["type"] = meant.pop()
        names_some = "properties" in found or found.get("patternProperties")
        if names_some and not any(keyword in schema for keyword in _OTHERS):
            # A required name is named too, and may have any value.
            named = found.get("properties", {})
            found["properties"] = named | {name: True for name in found.get("required", ()) if name not in named}
            self._closed.append(found)
        return found

    def _note_joins(self, schema: Mapping[str, Any]) -> None:
        own = schema.get("properties", {})
        naming = [part for part in schema.get("allOf", ()) if _may_name(part, own)]
        naming += [key for key in ("anyOf", "oneOf") if any(_may_name(part, own) for part in schema.get(key, ()))]
        naming += [key for key in ("$ref", *_NAMING[:1]) if key in schema]
        self._names_twice |= len(naming) > 1
        self._joins |= any(keyword in schema for keyword in _JOINING)

    def _follow_references(self, found: dict[str, Any]) -> None:
        """Check references, and rewrite what they name beyond the places of schemas, such as OpenAPI's `components`."""
        ending: set[str] = set()
        # It grows on the way.
        for place, part in self._referring:
            seen: dict[str, None] = {}
            schema: Any = part
            # A reference to a reference and so on.
            while isinstance(schema, Mapping) and (reference := schema.get("$ref")) is not None:
                if reference in ending:
                    break
                if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
                    message = f"$ref is {reference!r:.50}; only references within the schema, '#/…', are supported"
                    raise SchemaError(place, message)
                if reference in seen:
                    raise SchemaError(place, f"$ref {reference!r:.50} leads back to itself; correct it")
                seen[reference] = None
                schema = referred_part(self._root, reference)
                if schema is None:
                    raise SchemaError(place, f"$ref is {reference!r:.50}, which is not there; correct it")
            ending.update(seen)
            target = referred_part(self._root, part["$ref"])
            if not isinstance(target, bool) and id(target) not in self._rewritten:
                name = f"{len(self._rewritten)} {part['$ref']}"
                found.setdefault("$defs", {})[name] = self._part(unquote(part["$ref"][1:]), target)
                part["$ref"] = f"#/$defs/{quote(name.replace('~', '~0').replace('/', '~1'))}"

    def _follow_names(self, place: str, found: dict[str, Any], names: Any) -> None:
        """Write `propertyNames` as `patternProperties`."""
        if isinstance(names, Mapping) and isinstance(names.get("$ref"), str):
            names = referred_part(self._root, names["$ref"])
        pattern = _name_pattern(names) if isinstance(names, Mapping) else None
        if pattern == "":
            return
        if pattern is None or any(keyword in found for keyword in _NAMING):
            raise SchemaError(place, "'propertyNames' is not supported here; write it as 'patternProperties'")
        found["patternProperties"] = {pattern: found.get("additionalProperties", True)}
        found["additionalProperties"] = False

    def _check_multiples(self) -> None:
        places = 0
        for place, value in self._multiples:
            own = _places(value)
            if own > _MOST_PLACES or value.scaleb(own) > _MOST_MULTIPLE:
                limit = f"{_MOST_PLACES} decimal places, and must be at most {_MOST_MULTIPLE} without its decimal point"
                raise SchemaError(place, f"multipleOf is {value}; it may have at most {limit}")
            places = max(places, own)
        # Where one value has several, it is a multiple of all.
        if self._joins and math.lcm(*(int(value.scaleb(places)) for _, value in self._multiples)) > _MOST_MULTIPLE:
            raise SchemaError(self._multiples[-1][0], "multipleOf beside others is not supported; keep one of them")


def _places(value: Decimal) -> int:
    """Return the number of decimal places."""
    return max(-int(value.normalize().as_tuple().exponent), 0)


def _may_name(schema: Any, own: Mapping[str, Any]) -> bool:
    """Return whether a schema may name properties other than its neighbour's own."""
    if not isinstance(schema, Mapping):
        return False
    return any(key in schema for key in (*_NAMING, *_JOINING)) or not own.keys() >= set(schema.get("required", ()))


def _add_count(found: dict[str, Any], place: str, keyword: str, count: int) -> None:
    if count <= _MOST_REPEATED:
        found[keyword] = count
    # No output is as long as to reach a larger limit.
    elif keyword.startswith("min"):
        raise SchemaError(place, f"{keyword} is {count!r:.50}; it must be below 2^31")


def _check_count_of_names(place: str, found: Mapping[str, Any]) -> None:
    least, is_free = found["minProperties"], found.get("additionalProperties", True) is not False
    if least > len(found.get("required", ())) + 1 and (is_free or found.get("patternProperties")):
        # A free name may come twice, and counts once.
        raise SchemaError(place, f"minProperties {least} beside free names is not supported; lower it")


def _float_bound(place: str, keyword: str, value: float) -> float:
    """Return a bound as llguidance (1.9) reads it, at most narrower: a float of a whole number of 64 bits."""
    is_most = keyword in ("maximum", "exclusiveMaximum")
    far = value if is_most else -value
    if far >= _BEYOND:
        value = _LARGEST if is_most else -_LARGEST
    elif far <= -_BEYOND:
        raise SchemaError(place, f"{keyword} is {value!r:.50}; numbers of more than 64 bits are not supported")
    elif abs(value) > 1 << 53:
        near = int(float(value))
        if (near > value) if is_most else (near < value):
            near = int(math.nextafter(float(value), -math.inf if is_most else math.inf))
        value = near
    return value


def _rename_unevaluated(place: str, found: dict[str, Any]) -> None:
    """Write keywords that mean the same where no schema is joined as those that are followed."""
    for keyword, same in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if keyword in found:
            if any(name in found for name in _JOINING):
                raise SchemaError(place, f"{keyword!r} beside other schemas is not supported; leave it out")
            found.setdefault(same, found[keyword])
            del found[keyword]


def _name_pattern(names: Mapping[str, Any]) -> str | None:
    """Return a pattern of the texts that follow a schema, empty for any; None if it has other keywords than one has."""
    own = {keyword: value for keyword, value in names.items() if keyword in ("enum", "const") or keyword in VALUES}
    match {keyword: own[keyword] for keyword in own if keyword not in ("type", "title", "description")}:
        case {"enum": list(texts), **rest} if not rest:
            return f"^({'|'.join(re.escape(text) for text in texts if isinstance(text, str))})$"
        case {"const": str(text), **rest} if not rest:
            return f"^{re.escape(text)}$"
        case {"pattern": str(pattern), **rest} if not rest:
            return plain_sets(pattern)
        case {"minLength": least, "maxLength": most, **rest} if not rest:
            return rf"^[\s\S]{{{least},{most}}}$"
        case {"maxLength": most, **rest} if not rest:
            return rf"^[\s\S]{{0,{most}}}$"
        case {"minLength": least, **rest} if not rest:
            return rf"^[\s\S]{{{least},}}$"
        case {**rest} if not rest and "string" in declared_types(names):
            return ""
    return None


def _follow_format(place: str, found: dict[str, Any]) -> None:
    """Write a format as a pattern."""
    name = found.pop("format")
    if pattern := FORMATS.get(name):
        text = f"^({pattern})$"
        if "pattern" not in found:
            found["pattern"] = text
        else:
            found["allOf"] = [*found.get("allOf", ()), {"pattern": text}]
    elif "string" in declared_types(found) and "enum" not in found and "const" not in found:
        raise SchemaError(place, f"format is {name!r:.50}; supported are {', '.join(FORMATS)}")


def _is_number(value: Any) -> bool:
    # A whole number may be larger than any float.
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole or (isinstance(value, float) and math.isfinite(value))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == value // 1,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, Mapping),
}


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
    "a number": _is_number,
    "a number above 0": lambda value: _is_number(value) and value > 0,
    "a whole number, at least 0": lambda value: is_type(value, "integer") and value >= 0,
    "a JSON type or a list of them": _is_types,
    "a list of different texts": _is_different_texts,
    "a list": lambda value: isinstance(value, list),
    "a schema": lambda value: isinstance(value, bool | Mapping),
    "a list of at least one schema": lambda value: isinstance(value, list) and bool(value),
    "an object of schemas": lambda value: isinstance(value, Mapping),
}
