"""Hypothesis strategies of JSON schemas, and of values that follow them."""

from typing import Any

from hypothesis import strategies as st

from specdec.json_schema.keywords import FORMATS, TYPES

Schema = dict[str, Any] | bool

NAMES = ("a", "ab", "b", 'q"', "é", "title", "")
PATTERNS = (
    *(
        r"^a\"b$",
        r"^\d{2}$",
        "^[a-c]+$",
        r"^\\$",
        "b",
        "^a|c$",
        r"^(\s|x)y?$",
        "^[^a-y]{1,2}$",
        r"^\W$",
        r"^.$",
        "^$",
        "^€+$",
    ),
    *(
        "^(ab|a)*$",
        r"^[\]\-^]$",
        "^(?:x|yz){1,2}$",
        r"^\/\.\x41\u00e9$",
        "^[\\d_-]{2,}$",
        r"\n",
        "^(^a$|b)$",
        "(^a$|^b$)",
    ),
    *(r"^\S\D$", r"^[^\w]$", "^(?=a)a", r"^(a)\1$", r"\bword\b", "^a^", "^a{2}?$", "^{$", "^a{,2}$", "^[[]$"),
)
LITERALS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -3, 2.5, 12, "", "a", "ab", 'q"\\', "é", "\n\x01/", "2024-02-29"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
    max_leaves=4,
)
small = st.integers(0, 3)
bounds = st.sampled_from([-100, -12, -7, -2.5, -1, -0.25, 0, 0.5, 1, 3, 7.125, 10, 12, 99, 123.4, 1000])


def some(draw: st.DrawFn, **values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Return some of the keywords, in any order, with a value each."""
    names = draw(st.lists(st.sampled_from(sorted(values)), unique=True, max_size=4))
    return {name: draw(values[name]) for name in names}


@st.composite
def texts(draw: st.DrawFn) -> Schema:
    part = draw(st.sampled_from(["length", "pattern", "format"]))
    if part == "length":
        return {"type": "string", **some(draw, minLength=small, maxLength=st.integers(1, 5))}
    if part == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(PATTERNS))}
    return {"type": "string", "format": draw(st.sampled_from(sorted(FORMATS)))}


@st.composite
def numbers(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["integer", "number"]))
    ends = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), bounds)
    return {"type": kind, **some(draw, **ends, multipleOf=st.sampled_from([1, 2, 3, 5.0, 7, 12, 0.5, 0.01]))}


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    return {
        "type": "array",
        **some(draw, items=inner, prefixItems=st.lists(inner, min_size=1, max_size=2), minItems=small, maxItems=small),
    }


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=3))
    found: dict[str, Any] = {"type": "object"}
    if properties or draw(st.booleans()):
        found["properties"] = properties
        found["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    others: dict[str, Any] = {
        "additionalProperties": inner,
        "minProperties": small,
        "maxProperties": small,
        "patternProperties": st.dictionaries(st.sampled_from(["^x", "^a", "y$", "^z-"]), inner, max_size=2),
        "propertyNames": st.sampled_from(
            [{"maxLength": 1}, {"pattern": "^a"}, {"enum": ["a", "b", 3]}, {"type": "string"}]
        ),
    }
    return found | some(draw, **others)


@st.composite
def combinations(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    types = draw(st.sampled_from([{}, {"type": "string"}, {"type": ["integer", "null"]}, {"type": "number"}]))
    kind = draw(st.sampled_from(["anyOf", "oneOf", "allOf", "$ref", "enum", "const", "types"]))
    if kind in ("anyOf", "oneOf"):
        return {kind: draw(st.lists(inner, min_size=1, max_size=3)), **types}
    if kind == "allOf":
        return {kind: [draw(inner)], **types}
    if kind == "$ref":
        return {kind: draw(st.sampled_from(["#/$defs/one", "#/$defs/a~1b", "#"])), **types}
    if kind == "types":
        return {"type": draw(st.lists(st.sampled_from(TYPES), unique=True, min_size=1))}
    limits = some(draw, minimum=bounds, maximum=bounds, maxLength=small, pattern=st.sampled_from(PATTERNS[:8]))
    values = draw(st.lists(LITERALS, min_size=1, max_size=5)) if kind == "enum" else draw(LITERALS)
    return {kind: values, **types, **limits}


def parts() -> st.SearchStrategy[Schema]:
    leaves = st.one_of(texts(), numbers(), st.sampled_from([True, {}, {"type": "null"}, {"type": "boolean"}, False]))
    return st.recursive(leaves, lambda inner: arrays(inner) | objects(inner) | combinations(inner), max_leaves=6)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a schema over the keywords that are followed."""
    schema = draw(parts().filter(lambda part: isinstance(part, dict)))
    assert isinstance(schema, dict)
    return {**schema, "$defs": {"one": draw(parts()), "a/b": draw(parts())}}


@st.composite
def wild_schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Draw any keywords beside each other, those that are refused too."""
    inner = st.sampled_from(
        [True, False, {}, {"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 3}, {"const": 1}]
    )
    maps = st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
    values: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), unique=True, min_size=1, max_size=3),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), bounds),
        "multipleOf": st.sampled_from([1, 3, 0.5]),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), small),
        "pattern": st.sampled_from(PATTERNS),
        "format": st.sampled_from([*FORMATS, "int32", "idn-email"]),
        **dict.fromkeys(("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "not"), inner),
        **dict.fromkeys(("propertyNames", "contains", "if", "then"), inner),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), st.lists(inner, min_size=1, max_size=2)),
        **dict.fromkeys(("properties", "$defs"), maps),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=2),
        "required": st.lists(st.sampled_from(NAMES), unique=True, max_size=2),
        "dependentRequired": st.just({"a": ["b"]}),
        "enum": st.lists(LITERALS, max_size=4),
        "const": LITERALS,
        "$ref": st.sampled_from(["#/$defs/a", "#", "#/nope"]),
        "uniqueItems": st.booleans(),
        **dict.fromkeys(("title", "x-unknown"), st.just("a")),
    }
    names = draw(st.lists(st.sampled_from(sorted(values)), unique=True, min_size=1, max_size=4))
    return {name: draw(values[name]) for name in names}


@st.composite
def values(draw: st.DrawFn, schema: Any, root: dict[str, Any], depth: int = 0) -> Any:
    """Draw a value that is likely to follow a schema."""
    if schema is True or not schema or depth > 4:
        return draw(LITERALS)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"])) if schema["enum"] else None
    if "$ref" in schema:
        target = {"#": root, "#/$defs/one": root["$defs"]["one"], "#/$defs/a~1b": root["$defs"]["a/b"]}[schema["$ref"]]
        return draw(values(target, root, depth + 1))
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return draw(values(draw(st.sampled_from(schema[keyword])), root, depth))
    types = schema.get("type", TYPES)
    kind = types if isinstance(types, str) else draw(st.sampled_from(types))
    match kind:
        case "null":
            return None
        case "boolean":
            return draw(st.booleans())
        case "string":
            return draw(_text(schema))
        case "integer" | "number":
            return draw(_number(schema, kind))
        case "array":
            first, size = schema.get("prefixItems", []), draw(st.integers(0, 3))
            rest = schema.get("items", True)
            return [draw(values((first[i : i + 1] or [rest])[0], root, depth + 1)) for i in range(size)]
        case _:
            return draw(_object(schema, root, depth))


@st.composite
def _text(draw: st.DrawFn, schema: dict[str, Any]) -> str:
    if "pattern" in schema:
        # Characters whose kind ECMAScript and Python see alike.
        alphabet = st.characters(codec="ascii", exclude_categories=["Cc"]) | st.sampled_from("\t\n€é")
        # Python's `$` also matches before a line end.
        return draw(st.from_regex(schema["pattern"], alphabet=alphabet)).rstrip("\n")
    if "format" in schema:
        return draw(st.from_regex(FORMATS[schema["format"]], fullmatch=True, alphabet=st.characters(codec="ascii")))
    return draw(st.text(st.characters(codec="utf-8"), max_size=6))


@st.composite
def _number(draw: st.DrawFn, schema: dict[str, Any], kind: str) -> float:
    lows = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    highs = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    low = int(max(lows, default=min(highs, default=0) - 2000)) - 1
    high = int(min(highs, default=max(lows, default=0) + 2000)) + 1
    found = draw(st.integers(low, max(low, high)))
    # A whole number is written without a point.
    eighths = 0 if kind == "integer" else draw(st.integers(-7, 7))
    return found + eighths / 8 if eighths else found


@st.composite
def _object(draw: st.DrawFn, schema: dict[str, Any], root: dict[str, Any], depth: int) -> dict[str, Any]:
    found = {}
    for name, part in schema.get("properties", {}).items():
        if name in schema.get("required", []) or draw(st.booleans()):
            found[name] = draw(values(part, root, depth + 1))
    rest = schema.get("additionalProperties", "properties" not in schema and not schema.get("patternProperties"))
    if rest is not False:
        names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=3)
        for name in draw(st.lists(names | st.sampled_from(["a", "b", "aa"]), max_size=2, unique=True)):
            if name not in schema.get("properties", {}):
                found[name] = draw(values(rest, root, depth + 1))
    for pattern, part in schema.get("patternProperties", {}).items():
        if draw(st.booleans()):
            name = draw(st.from_regex(pattern, alphabet=st.sampled_from("axyz-q")))
            if name not in schema.get("properties", {}):
                found[name] = draw(values(part, root, depth + 1))
    return found
