"""Schemas that were followed in part: each keyword beside the others is followed, or refused by name."""

import re
import sys
from decimal import Decimal
from typing import Any

import pytest

from tests.specdec.structured.byte_grammars import accepts, compiled

LARGEST, THREES = sys.float_info.max, int(400 * "3")
LARGEST_DIGITS = format(Decimal(repr(LARGEST)), "f")
# A schema, texts that its grammar accepts and texts that it does not.
FOLLOWED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a quote in a pattern": ({"type": "string", "pattern": '^a"b$'}, [r'"a\"b"'], ['"a"b"']),
    "a backslash in a pattern": (
        {"type": "string", "pattern": r"^\\[\\x]$"},
        [r'"\\\\"', r'"\\x"'],
        [r'"\x"', r'"\\"'],
    ),
    "line ends in a pattern": ({"type": "string", "pattern": r"^\s\n\t$"}, [r'"\n\n\t"', r'" \n\t"'], ['"\n\n\t"']),
    "digits in a pattern": ({"type": "string", "pattern": r"^\d\D\W$"}, ['"1a-"', r'"1\"\u0001"'], ['"٣a-"', '"1aé"']),
    "a class without some": (
        {"type": "string", "pattern": "^[^a]$"},
        [r'"\""', r'"\\"', '"é"', r'"\n"'],
        ['"a"', '"""', '"\n"'],
    ),
    "a pattern without ends": ({"type": "string", "pattern": "b|^c"}, ['"abc"', '"b"', '"cx"'], ['"ac"', '""']),
    "a pattern with a group of ends": ({"type": "string", "pattern": "(^a$|^b$)"}, ['"a"', '"b"'], ['"ab"']),
    "a list without items": ({"type": "array", "maxItems": 3}, ["[]", '[1, "a", {"b": []}]'], ["[1, 2, 3, 4]"]),
    "a list of at least one": ({"type": "array", "minItems": 1}, ["[null]"], ["[]"]),
    "first items": (
        {"type": "array", "prefixItems": [{"type": "null"}, True], "items": {"type": "integer"}, "maxItems": 3},
        ["[]", "[null]", '[null, "a"]', "[null, 1, 2]"],
        ["[1]", "[null, 1, null]", "[null, 1, 2, 3]"],
    ),
    "bounds beside enum": ({"enum": [1, 2, 3, "a"], "minimum": 2}, ["2", "3", '"a"'], ["1"]),
    "type beside enum": ({"enum": [1, "1", True, None], "type": ["string", "boolean"]}, ['"1"', "true"], ["1", "null"]),
    "length beside enum": (
        {"type": "string", "enum": ["a", "ab", "b"], "maxLength": 1, "pattern": "a"},
        ['"a"'],
        ['"ab"', '"b"'],
    ),
    "an unknown format beside values": (
        {"enum": ["#fff", "#000"], "type": "string", "format": "color"},
        ['"#fff"', '"#000"'],
        ['"#00f"'],
    ),
    "an unknown format beside a value": ({"const": "+15550100", "format": "phone"}, ['"+15550100"'], ['"+1"']),
    "format beside enum": (
        {"enum": ["2024-02-29", "2023-02-29"], "format": "date"},
        ['"2024-02-29"'],
        ['"2023-02-29"'],
    ),
    "const beside enum": ({"enum": [[1], {"a": "/"}], "const": {"a": "/"}}, ['{"a": "/"}'], ["[1]"]),
    "reference beside enum": (
        {"enum": [1, "a"], "$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}},
        ["1"],
        ['"a"'],
    ),
    "type beside reference": (
        {"$ref": "#/$defs/n", "type": "integer", "$defs": {"n": {"type": ["string", "number"], "maximum": 3}}},
        ["3"],
        ["2.5", '"a"', "4"],
    ),
    "type beside anyOf": (
        {"type": "string", "anyOf": [{"minLength": 3}, {"maxLength": 1}, {"type": "null"}]},
        ['"a"', '"abc"'],
        ['"ab"', "null", "1"],
    ),
    "bounds of a number": (
        {"type": "number", "minimum": -0.5, "exclusiveMaximum": 12.25},
        ["-0.5", "-0.499", "0", "0.0", "12", "12.249999", "9.50"],
        ["-0.51", "-1", "12.25", "12.3", "13", "1e1"],
    ),
    "bounds of floats": (
        {"type": "number", "minimum": -LARGEST, "maximum": LARGEST},
        ["-1.5", "0", "3.25", LARGEST_DIGITS, f"-{LARGEST_DIGITS}.0", "17" + 306 * "9" + ".5"],
        ["18" + 307 * "0", f"{LARGEST_DIGITS[:17]}1{LARGEST_DIGITS[18:]}", f"{LARGEST_DIGITS}.01", 310 * "1"],
    ),
    "bounds of many digits": (
        {"type": "integer", "minimum": -(10**399), "maximum": THREES},
        ["0", str(THREES), 400 * "2", "-1" + 399 * "0"],
        [str(THREES + 1), 400 * "4", "-1" + 398 * "0" + "1"],
    ),
    "a small bound": (
        {"type": "number", "minimum": 1e-100},
        ["0." + 99 * "0" + "1", "0.1", "12.5"],
        ["0", "0." + 99 * "0", "-1", "0." + 100 * "0" + "1"],
    ),
    "whole numbers larger than floats": (
        {"enum": [10**320, 3], "minimum": 4, "maximum": 10**330},
        [str(10**320)],
        ["3"],
    ),
    # xgrammar takes 2^32 + 2 for 2.
    "many characters": ({"type": "string", "maxLength": (1 << 32) + 2}, ['"abc"'], ["1"]),
    "many items": ({"type": "array", "maxItems": 10**12}, ["[1, 2, 3]"], ["1"]),
    "many names": ({"type": "object", "maxProperties": 1 << 31}, ['{"a": 1, "b": 2}'], ["1"]),
    "whole numbers by a fraction": (
        {"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3},
        ["1", "2"],
        ["0", "3", "-1"],
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, ["0", "-14", "7000"], ["1", "71", "-0"]),
    "multipleOf of a number": (
        {"type": "number", "multipleOf": 5, "minimum": 7, "maximum": 20},
        ["10", "20"],
        ["5", "12", "10.5"],
    ),
    "names beside properties": (
        {"type": "object", "properties": {"a": {}, "bc": {}}, "propertyNames": {"maxLength": 1}, "required": ["a"]},
        ['{"a": 1}'],
        ['{"a": 1, "bc": 2}', '{"b": 1}'],
    ),
    "patterns beside properties": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}},
            "patternProperties": {"^x": {"type": "integer"}, "^y": {"type": "null"}},
        },
        ['{"a": null, "x1": 2}', '{"x": 1, "y": null}', "{}"],
        ['{"a": 1}', '{"x": null}', '{"b": 1}'],
    ),
    "other names": (
        {"type": "object", "properties": {"ab": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
        ['{"ab": 1, "a": null, "abc": null, "": null, "\\"": null}', '{"b": null}'],
        ['{"ab": null}', '{"ab": 1, "ab": null}', r'{"a\u0062": null}', '{"b": 1}'],
    ),
    "counted names": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "maxProperties": 2},
        ['{"a": 1, "b": 1}', '{"b": 1, "c": 1}'],
        ['{"a": 1}', '{"a": 1, "b": 1, "c": 1}', "{}"],
    ),
    "properties named as annotations": (
        {
            "type": "array",
            "prefixItems": [
                {"type": "object", "properties": {"title": {"type": kind}}, "required": ["title"]}
                for kind in ("null", "boolean")
            ],
        },
        ['[{"title": null}, {"title": true}]'],
        ['[{"title": null}, {"title": null}]'],
    ),
    "a reference with escapes": ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "null"}}}, ["null"], ["1"]),
    "oneOf that exclude each other": (
        {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": kind}, "n": {}}, "required": ["kind"]}
                for kind in ("a", "b")
            ]
        },
        ['{"kind": "a"}', '{"kind": "b", "n": 1}'],
        ['{"kind": "c"}'],
    ),
    "a branch that no value follows": (
        {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 1}, {"const": 1}]},
        ["1"],
        ['"a"'],
    ),
}
PART = {"type": "string", "minLength": 1}
# A schema, and what its refusal says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "format beside length": ({"type": "string", "format": "date", "maxLength": 3}, "'format' beside 'maxLength'"),
    "format beside pattern": ({"type": "string", "format": "date", "pattern": "a"}, "'format' beside 'pattern'"),
    "pattern beside length": ({"type": "string", "minLength": 3, "pattern": "a"}, "'pattern' beside 'minLength'"),
    "lookahead": (
        {"type": "string", "pattern": "^(?=a)a$"},
        "at '/pattern', the pattern '^(?=a)a$' cannot be followed: lookahead",
    ),
    "negative lookahead": ({"properties": {"a": {"type": "string", "pattern": "(?!a)"}}}, "at '/properties/a/pattern'"),
    "lookbehind": ({"type": "string", "pattern": "(?<!a)b"}, "lookbehind '(?<!' is not supported"),
    "a boundary": ({"type": "string", "pattern": r"\bword"}, r"'\b' is not supported"),
    "a group read again": ({"type": "string", "pattern": r"(a)\1"}, r"'\1' is not supported"),
    "an end in the middle": ({"type": "string", "pattern": "a^b"}, "'^' in the middle is not supported"),
    "flags": ({"type": "string", "pattern": "(?i)a"}, "'(?i)' is not supported"),
    "a bound that is too small": (
        {"type": "number", "minimum": 1e-101},
        "the bound 1E-101 is not supported; give it at",
    ),
    "a bound that is too large": (
        {"type": "integer", "maximum": 10**400},
        "at most 400 digits before the point and 100",
    ),
    "characters beyond counting": (
        {"type": "string", "minLength": (1 << 32) + 2},
        "minLength is 4294967298; it must be below 2^31",
    ),
    "items beyond counting": ({"type": "array", "minItems": 10**400}, "minItems is 1000"),
    "names beyond counting": ({"type": "object", "minProperties": 1 << 31}, "minProperties is 2147483648; it must"),
    "multipleOf in fractions": ({"type": "number", "multipleOf": 0.01}, "multipleOf is 0.01; only whole numbers"),
    "multipleOf beside one far bound": (
        {"type": "integer", "multipleOf": 3, "minimum": 10},
        "give 'minimum' and 'maximum'",
    ),
    "names beside other names": (
        {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "a"}, "additionalProperties": {}},
        "'propertyNames' beside 'properties'",
    ),
    "a name with two schemas": (
        {"type": "object", "properties": {"ab": {}}, "patternProperties": {"^a": {}}},
        "'^a' matches 'ab'",
    ),
    "patterns that meet": ({"type": "object", "patternProperties": {"a": {}, "^b": {}}}, "may match the same name"),
    "patterns beside other names": (
        {"type": "object", "patternProperties": {"^b": {}}, "additionalProperties": PART},
        "'additionalProperties' beside 'patternProperties'",
    ),
    "many free names": ({"type": "object", "minProperties": 2}, "minProperties 2 beside free names"),
    "bounds beside a reference": (
        {"$ref": "#/$defs/a", "maxLength": 3, "$defs": {"a": PART}},
        "'maxLength' beside '$ref'",
    ),
    "bounds beside anyOf": ({"type": "string", "anyOf": [PART], "maxLength": 3}, "'maxLength' beside 'anyOf'"),
    "oneOf that overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "write 'anyOf'"),
    "lengths": (
        {"anyOf": [{"type": "string", "minLength": 3, "maxLength": 1}]},
        "at '/anyOf/0', no value follows minLength 3",
    ),
    "counts of items": ({"type": "array", "minItems": 3, "maxItems": 1}, "no value follows minItems 3"),
    "counts of names": ({"type": "object", "minProperties": 3, "maxProperties": 1}, "no value follows minProperties 3"),
    "no value": (
        {"type": "object", "properties": {"a": {"enum": [1], "minimum": 2}}, "required": ["a"]},
        "no value follows",
    ),
    "no end": ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no value follows"),
    "a circle": ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "leads back to itself"),
    "a circle of two": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
        "leads back to itself",
    ),
    "an inner $id": ({"properties": {"a": {"$id": "x"}}}, "'$id' within a schema"),
    "items of older drafts": (
        {"type": "array", "items": [PART]},
        "items is [{'type': 'string', 'minLength': 1}]; it must be a schema",
    ),
    "bounds of older drafts": (
        {"type": "integer", "maximum": 3, "exclusiveMaximum": True},
        "exclusiveMaximum is True; it must be a number",
    ),
    "no schema": ({"properties": {"a": 3}}, "at '/properties/a', there is 3; a schema is an object"),
    "no pattern": ({"type": "string", "pattern": "["}, "pattern is '['; it must be a regular expression"),
    "a pattern of ECMAScript alone": (
        {"type": "string", "pattern": r"^(?<y>\d{4})$"},
        "it must be a regular expression that Python's re reads too",
    ),
    "a name's pattern of ECMAScript alone": (
        {"type": "object", "patternProperties": {r"^\p{L}": {}}},
        "it must be an object of schemas by regular expressions that Python's re reads too",
    ),
    "no list": ({"type": "object", "required": "a"}, "required is 'a'; it must be a list of different texts"),
    "no type": ({"type": ["string", "strng"]}, "type is ['string', 'strng']; it must be a JSON type"),
    "not finite": ({"type": "number", "maximum": float("inf")}, "holds a value that JSON does not have"),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(name: str) -> None:
    schema, accepted, others = FOLLOWED[name]
    grammar = compiled(schema)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    schema, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        compiled(schema)
    assert re.fullmatch(r"structured_outputs\.json.+", str(caught.value))
