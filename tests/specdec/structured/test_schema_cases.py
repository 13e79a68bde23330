"""Schemas that were followed in part: each keyword beside the others is followed, or refused by name."""

import re
from typing import Any

import pytest

from tests.specdec.structured.byte_grammars import accepts, compiled

PART = {"type": "string", "minLength": 1}
# A schema, texts that its grammar accepts and texts that it does not.
FOLLOWED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a quote in a pattern": ({"type": "string", "pattern": '^a"b$'}, [r'"a\"b"'], ['"a"b"']),
    "a backslash in a pattern": (
        {"type": "string", "pattern": r"^\\[\\x]$"},
        [r'"\\\\"', r'"\\x"'],
        [r'"\x"', r'"\\"'],
    ),
    "sets that Rust reads as operations": (
        {"type": "string", "pattern": r"^[a&&b][a[c][x~~y][\[&][+--]$"},
        ['"&[~[-"', '"acx&+"', '"bay[,"'],
        ['"aza&+"', '"c[x[+"'],
    ),
    "line ends in a pattern": ({"type": "string", "pattern": r"^\s\n\t$"}, [r'"\n\n\t"', r'" \n\t"'], ['"\n\n\t"']),
    "digits in a pattern": ({"type": "string", "pattern": r"^\d\D\W$"}, ['"1a-"', '"1aé"'], ['"٣a-"', '"1aa"']),
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
        ["-0.51", "-1", "12.25", "12.3", "13", "1e1", "3.0000001"],
    ),
    "bounds that JavaScript has": (
        {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
        ["0", "9007199254740991", "-9007199254740991"],
        ["9007199254740992", "-9007199254740992", "0.5"],
    ),
    # Counts that a library may hold in 32 bits.
    "many characters": ({"type": "string", "maxLength": (1 << 32) + 2}, ['"abc"'], ["1"]),
    "many items": ({"type": "array", "maxItems": 10**12}, ["[1, 2, 3]"], ["1"]),
    "many names": ({"type": "object", "maxProperties": 1 << 31}, ['{"a": 1, "b": 2}'], ["1"]),
    "whole numbers by a fraction": (
        {"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3},
        ["1", "2"],
        ["0", "3", "-1"],
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, ["0", "-14", "7000"], ["1", "71"]),
    "multipleOf of a number": (
        {"type": "number", "multipleOf": 5, "minimum": 7, "maximum": 20},
        ["10", "20"],
        ["5", "12", "10.5"],
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
    "names by a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
        ['{"a": 1, "ab": 2}', "{}"],
        ['{"b": 1}', '{"a": "x"}'],
    ),
    "names by a list": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["a", "b."]}}},
        ['{"a": 1, "b.": null}'],
        ['{"bc": 1}'],
    ),
    "a required name without a schema": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]},
        ['{"a": null, "b": [1]}', '{"b": {}}'],
        ['{"a": null}', '{"b": 1, "c": 2}'],
    ),
    # As zod writes records.
    "names of any text": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        ['{"a": 1, "": 2}', "{}"],
        ['{"a": "x"}'],
    ),
    "names of any text beside properties": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "propertyNames": {"title": "Name"}},
        ['{"a": null}', "{}"],
        ['{"b": null}'],
    ),
    "names by their length": ({"type": "object", "propertyNames": {"maxLength": 1}}, ['{"a": 1}'], ['{"ab": 1}']),
    "a free name spelled as a named one": (
        {"type": "object", "properties": {"ab": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
        ['{"ab": 1, "b": null}'],
        [r'{"a\u0062": null}'],
    ),
    "pattern beside length": ({"type": "string", "minLength": 3, "pattern": "^a*$"}, ['"aaa"'], ['"aa"', '"aab"']),
    "format beside length": ({"type": "string", "format": "hostname", "maxLength": 3}, ['"a.b"'], ['"abcd"', '"."']),
    "format beside pattern": (
        {"type": "string", "format": "date", "pattern": "^2024"},
        ['"2024-02-29"'],
        ['"2023-02-01"', '"2024"'],
    ),
    "flags": ({"type": "string", "pattern": "^(?i)a$"}, ['"A"', '"a"'], ['"b"']),
    "classes that ECMAScript alone has": ({"type": "string", "pattern": r"^\p{Lu}$"}, ['"É"', '"A"'], ['"a"', '"1"']),
    "multipleOf in fractions": (
        {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 2},
        ["0.25", "1.5", "2"],
        ["0.255", "2.01"],
    ),
    "multipleOf beside one far bound": (
        {"type": "integer", "multipleOf": 3, "minimum": 10},
        ["12", "300"],
        ["9", "13"],
    ),
    "a name with two schemas": (
        {"type": "object", "properties": {"ab": {"type": "integer"}}, "patternProperties": {"^a": {"maximum": 3}}},
        ['{"ab": 3, "ac": 2}'],
        ['{"ab": "x"}', '{"ab": 4}'],
    ),
    "patterns beside other names": (
        {"type": "object", "patternProperties": {"^b": {"type": "null"}}, "additionalProperties": PART},
        ['{"a": "x", "b": null}'],
        ['{"b": "x"}', '{"a": ""}'],
    ),
    "free names that are counted": (
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": {}, "minProperties": 2},
        ['{"a": 1, "b": 2}'],
        ["{}", '{"a": 1}'],
    ),
    "bounds beside a reference": (
        {"$ref": "#/$defs/a", "maxLength": 3, "$defs": {"a": PART}},
        ['"abc"'],
        ['""', '"abcd"'],
    ),
    "bounds beside anyOf": ({"type": "string", "anyOf": [PART], "maxLength": 3}, ['"abc"'], ['""', '"abcd"']),
    "several schemas": (
        {"allOf": [{"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '{"b": 2}'],
    ),
    "no patterns of names": ({"type": "object", "patternProperties": {}}, ['{"a": 1}'], ["1"]),
    "a type that is meant": ({"properties": {"a": {"type": "null"}}}, ['{"a": null}', "{}"], ["1", '{"b": 1}']),
    "one of two names": (
        {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'],
        ["{}", '{"c": 1}'],
    ),
    "a reference to where no schema is": (
        {
            "$ref": "#/components/a~1b",
            "components": {
                "a/b": {"properties": {"x": {"$ref": "#/components/n"}}, "required": ["x"]},
                "n": {"type": "string", "format": "date"},
            },
        },
        ['{"x": "2024-02-29"}'],
        ['{"x": "2023-02-29"}', "{}", '{"x": "2024-02-29", "y": 1}'],
    ),
    "bounds beyond 64 bits": (
        {"type": "number", "minimum": -1.7e308, "maximum": 10**400},
        ["0", "-0.5", "9223372036854774784"],
        ["9223372036854775809", '"a"'],
    ),
    "bounds of 64 bits": (
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        ["0", "9223372036854774784"],
        ["9223372036854775808", "-1"],
    ),
    "a schema within itself": (
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        ["null"],
        ["1"],
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
    "a dialect that is not known": (
        {
            "$schema": "https://json-schema.org/draft-07/schema",
            "$id": "A name",
            "$ref": "#/$defs/a",
            "$defs": {"a": PART},
        },
        ['"a"'],
        ['""'],
    ),
    "a keyword that an older dialect lacks": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "prefixItems": [PART], "maxItems": 1},
        ['["a"]'],
        ["[1]"],
    ),
    "a branch that no value follows": (
        {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 1}, {"const": 1}]},
        ["1"],
        ['"a"'],
    ),
}
# A schema, and what its refusal says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lookahead": ({"type": "string", "pattern": "^(?=a)a$"}, "cannot be followed: '^(?=a)a$': look-around"),
    "a boundary": ({"type": "string", "pattern": r"\bword"}, "lookarounds not supported yet; WordUnicode"),
    "a group read again": ({"type": "string", "pattern": r"(a)\1"}, ": backreferences are not supported"),
    "no pattern": ({"type": "string", "pattern": "["}, "'[': unclosed character class"),
    "patterns that exclude each other": (
        {"type": "string", "format": "date", "pattern": "a"},
        "no text has its patterns and lengths",
    ),
    "values of many digits": ({"const": 10**400}, "number out of range"),
    "a bound that is too large": ({"type": "integer", "minimum": 10**20}, "numbers of more than 64 bits are not"),
    "a large multipleOf": ({"type": "integer", "multipleOf": 716_539}, "multipleOf is 716539; it may have at most"),
    "a fine multipleOf": ({"type": "number", "multipleOf": 1e-10}, "multipleOf is 1E-10; it may have at most 9"),
    "multipleOf that are joined": (
        {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 89, 83)]},
        "multipleOf beside others",
    ),
    "optional names that are counted": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2},
        "min/maxProperties only supported when",
    ),
    "an item that nothing is": ({"type": "array", "contains": False}, "'contains' is not supported"),
    "many free names": ({"type": "object", "minProperties": 2}, "minProperties 2 beside free names"),
    "names beside other names": (
        {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "a"}, "additionalProperties": {}},
        "'propertyNames' is not supported here",
    ),
    "names that are no text": (
        {"type": "object", "propertyNames": {"type": "number"}},
        "'propertyNames' is not supported",
    ),
    "patterns that meet": ({"type": "object", "patternProperties": {"a": {}, "^b": {}}}, "are not disjoint"),
    "oneOf that overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf' of schemas that may overlap"),
    "lengths": ({"anyOf": [{"type": "string", "minLength": 3, "maxLength": 1}]}, "minLength (3) is greater"),
    "counts of items": ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems (3) is greater than maxItems"),
    "no value": (
        {"type": "object", "properties": {"a": {"enum": [1], "minimum": 2}}, "required": ["a"]},
        "required property 'a' is unsatisfiable",
    ),
    "a circle": ({"properties": {"a": {"$ref": "#/properties/a"}}}, "leads back to itself"),
    "a circle of two": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
        "no text follows it",
    ),
    "no such place": ({"$ref": "#/$defs/a"}, "'#/$defs/a', which is not there"),
    "a reference to another document": ({"$ref": "other.json"}, "only references within the schema"),
    "characters beyond counting": (
        {"type": "string", "minLength": (1 << 32) + 2},
        "minLength is 4294967298; it must be below 2^31",
    ),
    "items beyond counting": ({"type": "array", "minItems": 10**400}, "minItems is 1000"),
    "names beyond counting": ({"type": "object", "minProperties": 1 << 31}, "minProperties is 2147483648; it must"),
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
