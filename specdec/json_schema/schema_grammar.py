"""The grammar of a JSON schema. Pure Python."""

from collections.abc import Iterable, Mapping
from typing import Any

from specdec.json_schema.converter import Converter
from specdec.json_schema.gbnf import Node, grammar_text, matches_text
from specdec.json_schema.keywords import TYPES
from specdec.json_schema.schema import SchemaError


def schema_grammar(schema: Mapping[str, Any], *, in_one_line: bool) -> str:
    """Return the grammar of a schema, in GBNF.

    Args:
        in_one_line: with one space after each comma and colon; otherwise blanks and line ends may stand between.

    Raises:
        SchemaError: a keyword that is not followed, with its place and the remedy, or a schema that no value follows.
    """
    converter = Converter(schema, in_one_line)
    text = grammar_text(converter.root(TYPES), converter.rules)
    if text is None:
        raise _contradiction(converter)
    return text


def schema_rules(schema: Mapping[str, Any], types: Iterable[str], prefix: str) -> tuple[Node, dict[str, Node]]:
    """Return the grammar of a schema in one line as a node, and the rules that it refers to.

    Args:
        types: JSON types of which a value has one.
        prefix: begins the names of this schema's own rules; rules of schemas with different prefixes can be joined.

    Raises:
        SchemaError: see `schema_grammar`.
    """
    converter = Converter(schema, True, prefix)
    root = converter.root(types)
    if not matches_text(root, converter.rules):
        raise _contradiction(converter)
    return root, converter.rules


def _contradiction(converter: Converter) -> SchemaError:
    return next(iter(converter.contradictions), SchemaError("", "no value follows the schema; correct it"))
