"""Conversion of a JSON schema to a grammar that matches the JSON texts of its values. Pure Python."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from specdec.json_schema.characters import ANY, any_character, complement, in_json, json_text
from specdec.json_schema.gbnf import (
    EMPTY,
    NEVER,
    Alt,
    Before,
    Node,
    Repeat,
    Rule,
    Text,
    alt,
    chars,
    matches_text,
    optional,
    seq,
    written,
)
from specdec.json_schema.keywords import CONSTRAINTS, FORMATS, INFERRED, TYPES
from specdec.json_schema.numbers import (
    MOST_LISTED,
    NUMBER,
    WHOLE,
    Bounds,
    multiples,
    number_bounds,
    numbers,
    whole_numbers,
)
from specdec.json_schema.patterns import pattern_grammar, whole_pattern_grammar
from specdec.json_schema.property_chains import PropertyChain
from specdec.json_schema.schema import Schema, SchemaError, declared_types, shared_types
from specdec.json_schema.text_trees import text_tree
from specdec.json_schema.values import Values, check_patterns, is_type

# Rules of one object whose properties are counted.
MOST_COUNTED = 10_000
# Greatest divisor of numbers without bounds, each remainder of which is a rule.
MOST_REMAINDERS = 1000
# Greatest count of a repetition in xgrammar, which holds counts in 32 bits. No output is longer.
MOST_REPEATED = (1 << 31) - 1
_ALL = frozenset(TYPES) - {"integer"}


class Converter:
    """Converts one schema.

    Args:
        root: the schema.
        in_one_line: see `schema_grammar`.
        prefix: begins the names of rules that belong to this schema.

    Attributes:
        rules: those that nodes refer to, by their names.
        contradictions: places where no value follows the schema.
    """

    def __init__(self, root: Mapping[str, Any], in_one_line: bool, prefix: str = "") -> None:
        self._schema, self._prefix = Schema(root), prefix
        self._values = Values(self._schema)
        blank = EMPTY if in_one_line else Rule("blank")
        self._comma = Text(", ") if in_one_line else seq(blank, Text(","), blank)
        self._colon = Text(": ") if in_one_line else seq(blank, Text(":"), blank)
        self._blank = blank
        # Rules by their bodies: many properties have the same schema.
        self._by_text: dict[str, Rule] = {}
        self.rules: dict[str, Node] = {}
        self.rules |= {
            "blank": Repeat(chars(" \n\r\t"), 0, None),
            "character": any_character(),
            "text": seq(Text('"'), Rule("text-end")),
            "text-end": _endless(any_character(), "text-end"),
            "name-end": _endless(in_json(ANY), "name-end"),
            "number": NUMBER,
            "array": self._list([], Rule("any"), 0, None),
            "object": self._pairs([], [seq(Rule("text"), self._colon, Rule("any"))]),
            "any": self._any(_ALL),
        }
        self.contradictions: list[SchemaError] = []
        self._references: dict[tuple[str, frozenset[str]], Rule] = {}

    def root(self, types: Iterable[str]) -> Node:
        """Return the values of some types that follow the schema; it may be a node that matches nothing.

        Raises:
            SchemaError: a keyword that is not followed.
        """
        return self._value(self._schema.root, "", shared_types(_ALL, types), frozenset())

    def _contradiction(self, place: str, problem: str) -> Node:
        """Return a node that matches nothing, and record the reason."""
        self.contradictions.append(SchemaError(place, f"no value follows {problem}; correct it"))
        return NEVER

    def _named(self, node: Node) -> Node:
        """Return a reference to a new rule with this body."""
        if isinstance(node, Text | Rule):
            return node
        rule = self._by_text.setdefault(written(node), Rule(f"{self._prefix}r{len(self.rules)}"))
        self.rules[rule.name] = node
        return rule

    def _any(self, types: frozenset[str]) -> Node:
        forms: dict[str, Node] = {
            "null": Text("null"),
            "boolean": alt(Text("true"), Text("false")),
            "integer": WHOLE,
            **{kind: Rule({"string": "text"}.get(kind, kind)) for kind in ("number", "string", "array", "object")},
        }
        return Alt(tuple(form for kind, form in forms.items() if kind in types))

    def _value(self, schema: Any, place: str, types: frozenset[str], passed: frozenset[str]) -> Node:
        """Return the values of some types that follow a schema.

        Args:
            passed: references on the way here from the same value.
        """
        if schema is False:
            return self._contradiction(place, "the schema false")
        if schema in (True, {}):
            return Rule("any") if types == _ALL else self._any(types)
        types = shared_types(types, declared_types(schema))
        values = self._values.listed(schema)
        if values is not None:
            values = [value for value in values if any(is_type(value, kind) for kind in types)]
            return self._one_of(values) if values else self._contradiction(place, "these keywords together")
        if "$ref" in schema:
            return self._referred(schema["$ref"], place, types, passed)
        if "oneOf" in schema:
            self._check_one_of(schema["oneOf"], place)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                parts = enumerate(schema[keyword])
                return Alt(tuple(self._value(part, f"{place}/{keyword}/{i}", types, passed) for i, part in parts))
        return self._typed(schema, place, types)

    def _typed(self, schema: Mapping[str, Any], place: str, types: frozenset[str]) -> Node:
        constrained = {kind: keyword for keyword, kind in CONSTRAINTS.items() if keyword in schema}
        if "type" not in schema and types == _ALL and constrained:
            kind = next(iter(constrained))
            if len(constrained) > 1 or kind not in INFERRED:
                raise SchemaError(place, f"{constrained[kind]!r} without 'type' is not supported; add the type")
            types = frozenset([kind])
        parts = [self._any(types - constrained.keys() - ({"integer"} if "number" in constrained else set()))]
        if "number" in constrained and types & {"number", "integer"}:
            parts.append(self._number(schema, place, "integer" in types))
        forms = {"string": self._string, "array": self._array, "object": self._object}
        parts += [form(schema, place) for kind, form in forms.items() if kind in constrained and kind in types]
        return Alt(tuple(parts))

    def _one_of(self, values: list[Any]) -> Node:
        written = [self._written(value) for value in values]
        texts = [each.text for each in written if isinstance(each, Text)]
        return Alt((*([text_tree(texts)] if texts else []), *(each for each in written if not isinstance(each, Text))))

    def _written(self, value: Any) -> Node:
        """Return the JSON text of one value."""
        if isinstance(value, str):
            return Text(json_text(value))
        if isinstance(value, list):
            return self._list([self._written(item) for item in value], NEVER, len(value), len(value))
        if isinstance(value, Mapping):
            return self._pairs([(key, self._written(each)) for key, each in value.items()], [])
        return Text(json.dumps(value))

    def _referred(self, reference: str, place: str, types: frozenset[str], passed: frozenset[str]) -> Node:
        rule = self._references.get((reference, types))
        if reference in passed or (rule is not None and passed):
            # The rule is known, and may be the one that is being made.
            self._check_ends({"$ref": reference}, place, passed)
        if rule is None:
            target = self._schema.referred(reference, place)
            rule = self._references[reference, types] = Rule(f"{self._prefix}ref{len(self._references)}")
            self.rules[rule.name] = NEVER
            self.rules[rule.name] = self._value(target, reference[1:], types, passed | {reference})
        return rule

    def _check_ends(self, schema: Any, place: str, passed: frozenset[str]) -> None:
        """Refuse references that lead back to themselves without a list or an object between."""
        if isinstance(schema, bool):
            return
        reference = schema.get("$ref")
        if reference in passed:
            raise SchemaError(place, f"$ref is {reference!r:.50}, which leads back to itself; correct it")
        if reference:
            self._check_ends(self._schema.referred(reference, place), place, passed | {reference})
        for keyword in ("anyOf", "oneOf", "allOf"):
            for part in schema.get(keyword, []):
                self._check_ends(part, place, passed)

    def _check_one_of(self, options: list[Any], place: str) -> None:
        for second in range(len(options)):
            for first in range(second):
                if not self._values.exclude(options[first], options[second]):
                    raise SchemaError(
                        place,
                        f"'oneOf' is not supported, as values may follow both its schemas {first} and {second}; write "
                        "'anyOf', or give each a required property with a 'const' of its own",
                    )

    def _number(self, schema: Mapping[str, Any], place: str, is_whole_number: bool) -> Node:
        bounds, multiple = number_bounds(schema, place)
        if not is_whole_number and "multipleOf" not in schema:
            found = numbers(bounds, self._named)
        else:
            listed = whole_numbers(bounds, self._named, multiple)
            found = self._multiples(bounds, multiple, place) if listed is None else listed
        return self._contradiction(place, "the bounds") if not matches_text(found, self.rules) else found

    def _multiples(self, bounds: Bounds, multiple: int, place: str) -> Node:
        """Return the grammar of all multiples, or of those of one sign."""
        low, high = bounds.scaled(0)
        if multiple <= MOST_REMAINDERS:
            positive, from_zero = (self._named(node) for node in multiples(multiple, self.rules))
            negative = seq(Text("-"), positive)
            if low is None and high is None:
                return alt(negative, from_zero)
            if high is None and low is not None and -multiple < low <= multiple:
                return positive if low > 0 else from_zero
            if low is None and high is not None and -multiple <= high < multiple:
                return negative if high < 0 else alt(negative, Text("0"))
        remedy = f"give 'minimum' and 'maximum' with fewer than {MOST_LISTED} multiples between"
        raise SchemaError(place, f"multipleOf {multiple} with these bounds is not supported; {remedy}")

    def _string(self, schema: Mapping[str, Any], place: str) -> Node:
        if "pattern" in schema or "format" in schema:
            if "format" in schema:
                content = whole_pattern_grammar(FORMATS[schema["format"]])
            else:
                content = self._pattern(schema["pattern"], f"{place}/pattern")
            return seq(Text('"'), content, Text('"'))
        least, most = _counts(schema, "Length", place)
        if most is not None and least > most:
            return self._contradiction(place, f"minLength {least} and maxLength {most}")
        return seq(Text('"'), Repeat(Rule("character"), least, most), Text('"'))

    def _pattern(self, pattern: str, place: str) -> Node:
        try:
            return pattern_grammar(pattern)
        except ValueError as error:
            raise SchemaError(place, f"the pattern {pattern!r:.50} cannot be followed: {error}") from None

    def _array(self, schema: Mapping[str, Any], place: str) -> Node:
        first = [self._child(part, f"{place}/prefixItems/{i}") for i, part in enumerate(schema.get("prefixItems", []))]
        keyword = "items" if "items" in schema else "unevaluatedItems"
        rest = self._child(schema.get(keyword, True), f"{place}/{keyword}")
        least, most = _counts(schema, "Items", place)
        if most is not None and least > most:
            return self._contradiction(place, f"minItems {least} and maxItems {most}")
        return self._list(first, rest, least, most)

    def _child(self, schema: Any, place: str) -> Node:
        return self._named(self._value(schema, place, _ALL, frozenset()))

    def _list(self, first: list[Node], rest: Node, least: int, most: int | None) -> Node:
        """Return the grammar of lists whose first items differ from the rest."""
        first = first[:most]
        if not first:
            return self._enclosed("[", self._separated(rest, least, most), "]")
        free = None if most is None else most - len(first)
        tail: Node = Repeat(seq(self._comma, rest), max(least - len(first), 0), free)
        for index in range(len(first) - 1, -1, -1):
            tail = self._named(seq(self._comma, first[index], tail) if index else seq(first[index], tail))
            if index >= least:
                tail = optional(tail)
        return self._enclosed("[", tail, "]")

    def _separated(self, item: Node, least: int, most: int | None) -> Node:
        """Return the grammar of items with commas between."""
        if most == 0:
            return EMPTY
        items = seq(item, Repeat(seq(self._comma, item), max(least - 1, 0), None if most is None else most - 1))
        return items if least else optional(items)

    def _enclosed(self, opening: str, inner: Node, closing: str) -> Node:
        return seq(Text(opening), self._blank, inner, self._blank, Text(closing))

    def _object(self, schema: Mapping[str, Any], place: str) -> Node:
        properties, required = schema.get("properties", {}), set(schema.get("required", []))
        for key in schema.get("required", []):
            if key not in properties:
                raise SchemaError(place, f"required names {key!r:.50}, which properties does not have; add it there")
        names = [key for key in properties if self._values.follows(key, schema.get("propertyNames", True))]
        if required - set(names):
            return self._contradiction(place, "'propertyNames' and 'required'")
        free = self._free_pairs(schema, place, names)
        pairs = [(key, self._child(properties[key], f"{place}/properties/{key}")) for key in names]
        least, most = _counts(schema, "Properties", place)
        if most is not None and (least > most or len(required) > most):
            return self._contradiction(place, f"minProperties {least}, maxProperties {most} and required")
        if free and least > len(required) + 1:
            # A name may be there twice.
            remedy = "name so many properties as 'required', or give 'additionalProperties': false"
            raise SchemaError(place, f"minProperties {least} beside free names is not supported; {remedy}")
        if len(pairs) * min(max(least, (most or 0) + 1), len(pairs)) > MOST_COUNTED and (least or most is not None):
            raise SchemaError(place, "'minProperties' or 'maxProperties' is not supported here; leave it out")
        return self._pairs(pairs, free, least, most, required=required)

    def _free_pairs(self, schema: Mapping[str, Any], place: str, names: list[str]) -> list[Node]:
        """Return the grammar of pairs that `properties` does not name."""
        patterns = schema.get("patternProperties", {})
        keyword = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
        rest = schema.get(keyword)
        if patterns:
            if rest not in (None, False):
                raise SchemaError(place, f"{keyword!r} beside 'patternProperties' is not supported; give it as false")
            found = [
                seq(
                    Text('"'),
                    self._named(self._pattern(pattern, f"{place}/patternProperties")),
                    Text('"'),
                    self._colon,
                    self._child(part, f"{place}/patternProperties/{pattern}"),
                )
                for pattern, part in patterns.items()
            ]
            check_patterns(patterns, schema.get("properties", {}), place)
            return found
        if rest is False or (rest is None and "properties" in schema):
            return []
        value = self._child(True if rest is None else rest, f"{place}/{keyword}")
        if "propertyNames" in schema:
            if names:
                remedy = f"give {keyword!r} as false"
                raise SchemaError(place, f"'propertyNames' beside 'properties' is not supported; {remedy}")
            where = f"{place}/propertyNames"
            key = self._named(self._value(schema["propertyNames"], where, frozenset(["string"]), frozenset()))
        else:
            key = seq(Text('"'), self._named(self._other_names(names))) if names else Rule("text")
        return [seq(key, self._colon, value)]

    def _other_names(self, names: list[str], start: str = "") -> Node:
        """Return the rest, with the closing quote, of names that begin with a text and are none of these.

        Each has one spelling.
        """
        parts: list[Node] = [] if start in names else [Text('"')]
        size = len(start)
        following = sorted({ord(name[size]) for name in names if len(name) > size and name.startswith(start)})
        others = complement((code, code) for code in following)
        parts.append(seq(in_json(others), Rule("name-end")))
        for char in map(chr, following):
            # A half of a surrogate pair is written as an escape, which no other name has.
            if not "\ud800" <= char <= "\udfff":
                parts.append(seq(Text(json_text(char)[1:-1]), self._named(self._other_names(names, start + char))))
        return Alt(tuple(parts))

    def _pairs(
        self,
        pairs: list[tuple[str, Node]],
        free: list[Node],
        least: int = 0,
        most: int | None = None,
        *,
        required: set[str] | None = None,
    ) -> Node:
        """Return the grammar of objects with these pairs in their order, then with free ones.

        Args:
            pairs: names and the grammars of their values.
            required: names that have to be there; all by default.
        """
        needed = {key for key, _ in pairs} if required is None else required
        # Counted are pairs as far as bounds tell them apart; the first has no comma.
        top = max(min(max(least, 0 if most is None else most + 1), len(pairs)), 1)

        def ending(written: int) -> Node:
            """Free pairs behind some others."""
            missing = max(least - written, 0)
            left = None if most is None else most - written
            if (left is not None and left < missing) or (missing and not free):
                return NEVER
            if not free or left == 0:
                return EMPTY
            pair = Alt(tuple(free))
            return Repeat(seq(self._comma, pair), missing, left) if written else self._separated(pair, missing, left)

        chain = PropertyChain(pairs, needed, self._comma, self._colon, self._named)
        endings = [self._named(ending(count)) for count in range(top + 1)]
        return self._enclosed("{", chain.node(*endings) if top == 1 else chain.counted(endings), "}")


def _endless(character: Node, name: str) -> Node:
    """Return the rule `name` for any characters and the closing quote."""
    following = seq(Repeat(chars(" \n\r\t"), 0, None), chars(",}]:"))
    return Before(alt(Text('"'), seq(character, Rule(name))), following)


def _counts(schema: Mapping[str, Any], what: str, place: str) -> tuple[int, int | None]:
    """Return the least and the greatest number of characters, items or properties; None for any."""
    least, most = int(schema.get(f"min{what}", 0)), schema.get(f"max{what}")
    if least > MOST_REPEATED:
        raise SchemaError(place, f"min{what} is {least!s:.50}; it must be below 2^31")
    return least, None if most is None or most > MOST_REPEATED else int(most)
