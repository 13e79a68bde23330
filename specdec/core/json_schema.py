"""Keywords of JSON schemas that no grammar follows exactly, and which are therefore refused. Pure Python."""

from collections.abc import Iterator, Mapping
from typing import Any

# Of draft 2020-12 and before; a grammar that ignored them would let wrong output through.
_REFUSED = (
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
# Keywords of whole values; xgrammar follows the first of them and ignores the constraints beside it.
_WHOLE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
# They are ignored where the type is not given.
_TYPED = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "pattern", "format"),
)
_CONSTRAINTS = (
    *("properties", "patternProperties", "additionalProperties", "required", "propertyNames", "minProperties"),
    *("maxProperties", "unevaluatedProperties", "items", "prefixItems", "additionalItems", "unevaluatedItems"),
    *("minItems", "maxItems", *_TYPED),
)
_FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
    *("uri-template", "json-pointer", "relative-json-pointer"),
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")


def check_schema(name: str, schema: Mapping[str, Any]) -> None:
    """Refuse keywords that would be ignored or followed in part.

    `oneOf` is followed as `anyOf`. Keywords that JSON Schema does not have are ignored, as it demands.

    Args:
        name: the schema's name in messages.

    Raises:
        ValueError: the keyword, its place and the remedy.
    """
    for place, part in _parts("", schema):
        problem = _problem(part)
        if problem:
            raise ValueError(f"{name}: at {place or '/'!r:.80}, {problem}")


def _problem(part: Mapping[str, Any]) -> str | None:
    for keyword in _REFUSED:
        if keyword in part and part[keyword] is not False:
            return f"{keyword!r} is not supported; leave it out"
    whole = [keyword for keyword in _WHOLE if keyword in part]
    beside = [keyword for keyword in part if keyword in _CONSTRAINTS]
    if whole and beside and whole[0] not in ("const", "enum"):
        return f"{beside[0]!r} beside {whole[0]!r} is not supported; move it into the schemas of {whole[0]!r}"
    if len(whole) > 1:
        return f"{whole[1]!r} beside {whole[0]!r} is not supported; keep one of them"
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        return "'allOf' with several schemas is not supported; write them as one"
    reference = part.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return f"$ref is {reference!r:.50}; only references within the schema, '#/…', are supported"
    if "pattern" in part and ("minLength" in part or "maxLength" in part):
        return "'pattern' beside 'minLength' or 'maxLength' is not supported; put the length into the pattern"
    if "format" in part and part.get("type", "string") == "string" and part["format"] not in _FORMATS:
        return f"format is {part['format']!r:.50}; supported are {', '.join(_FORMATS)}"
    untyped = [keyword for keyword in part if keyword in _TYPED]
    if untyped and "type" not in part and not whole:
        return f"{untyped[0]!r} without 'type' is not supported; add the type"
    properties, required = part.get("properties", {}), part.get("required", [])
    if isinstance(required, list) and isinstance(properties, Mapping):
        for key in required:
            if key not in properties:
                return f"required names {key!r:.50}, which properties does not have; add it there"
    return None


def _parts(place: str, schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a schema and all schemas in it, each with its place as a JSON pointer."""
    if not isinstance(schema, Mapping):
        return
    yield place, schema
    for key in _SINGLE:
        yield from _parts(f"{place}/{key}", schema.get(key))
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            for index, part in enumerate(schema[key]):
                yield from _parts(f"{place}/{key}/{index}", part)
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            for name, part in schema[key].items():
                yield from _parts(f"{place}/{key}/{name}", part)
