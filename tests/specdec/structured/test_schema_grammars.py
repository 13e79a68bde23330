"""Grammars of drawn schemas, by jsonschema: no text that does not follow the schema, and every value that does."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.exceptions import SchemaError as InvalidSchema
from jsonschema.validators import extend

from specdec import StructuredOutputsParams
from tests.specdec.structured.byte_grammars import accepts, by_python, compiled, random_output
from tests.specdec.structured.drawn_schemas import schemas, values, wild_schemas
from tests.strategies import seeds

pytestmark = pytest.mark.slow


def _by_pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not by_python(pattern).search(value):
        yield ValidationError(f"{value!r} does not match")


# Its patterns are Python's.
Validator = extend(Draft202012Validator, {"pattern": _by_pattern})


def is_valid(schema: dict[str, Any], text: str) -> bool:
    checker = Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return bool(checker.is_valid(json.loads(text)))


def check_outputs(schema: dict[str, Any], seed: int, in_one_line: bool) -> None:
    """Follow the schema with random outputs, unless it is refused in one line."""
    try:
        grammar = compiled(schema, in_one_line)
    except ValueError as error:
        # Place, problem and remedy.
        if not re.fullmatch(r"structured_outputs\.json.+;.+", str(error)):
            raise
        event("refused")
        return
    Draft202012Validator.check_schema(schema)
    for step in range(3):
        text = random_output(grammar, seed + step)
        event("too long" if text is None else "output")
        assert text is None or is_valid(schema, text), text


@pytest.mark.long
@given(schema=schemas(), seed=seeds, in_one_line=st.booleans())
def test_outputs_follow_the_schema(schema: dict[str, Any], seed: int, in_one_line: bool) -> None:
    check_outputs(schema, seed, in_one_line)


@given(schema=wild_schemas(), seed=seeds)
def test_unsupported_keywords_are_refused(schema: dict[str, Any], seed: int) -> None:
    check_outputs(schema, seed, True)


@pytest.mark.long
@given(data=st.data(), schema=schemas(), in_one_line=st.booleans())
def test_values_that_follow_the_schema_are_possible(
    data: st.DataObject, schema: dict[str, Any], in_one_line: bool
) -> None:
    try:
        grammar = compiled(schema, in_one_line)
    except ValueError:
        assume(False)
    value = data.draw(values(schema, schema))
    text = json.dumps(value, ensure_ascii=False)
    # Beside named properties, free names have no such escapes, and so no text has.
    assume(is_valid(schema, text) and "\\u00" not in text)
    assert accepts(grammar, text)
    if not in_one_line:
        assert accepts(grammar, json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        assert accepts(grammar, json.dumps(value, ensure_ascii=False, indent=2))


@pytest.mark.long
@given(schema=wild_schemas())
def test_invalid_schemas_are_refused(schema: dict[str, Any]) -> None:
    for keyword in schema:
        for wrong in (None, -1.5, "[", [], [3], {"a": 3}):
            changed = {**schema, keyword: wrong}
            try:
                # A pattern that is none is seen when the schema is compiled.
                Draft202012Validator.check_schema(changed, FormatChecker(()))
            except InvalidSchema:
                with pytest.raises(ValueError, match=r"structured_outputs\.json"):
                    StructuredOutputsParams(json=changed)
