"""Bounds of the numbers of a JSON schema. Pure Python."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from specdec.json_schema.numbers import MOST_BEHIND, MOST_DIGITS, Bounds
from specdec.json_schema.schema import SchemaError, is_whole

# Whole numbers up to this one are floats.
_WHOLE_FLOATS = 1 << 53


def number_bounds(schema: Mapping[str, Any], place: str) -> tuple[Bounds, int]:
    """Return the bounds of a schema's numbers, and what they are multiples of.

    Raises:
        SchemaError: a bound of too many digits, or a divisor that is no whole number.
    """
    lows = [(_decimal(schema[key]), key != "minimum") for key in ("minimum", "exclusiveMinimum") if key in schema]
    highs = [(_decimal(schema[key]), key == "maximum") for key in ("maximum", "exclusiveMaximum") if key in schema]
    low, low_open = max(lows, default=(None, False))
    high, high_closed = min(highs, default=(None, True))
    for end in (low, high):
        if end is not None and (end.adjusted() >= MOST_DIGITS or int(end.as_tuple().exponent) < -MOST_BEHIND):
            remedy = f"give it at most {MOST_DIGITS} digits before the point and {MOST_BEHIND} behind it"
            raise SchemaError(place, f"the bound {end!s:.50} is not supported; {remedy}")
    multiple = schema.get("multipleOf", 1)
    if not is_whole(multiple):
        raise SchemaError(place, f"multipleOf is {multiple}; only whole numbers are supported")
    is_open = "exclusiveMinimum" in schema or "exclusiveMaximum" in schema
    ends = [schema[key] for key in ("minimum", "maximum") if key in schema]
    are_floats = not is_open and all(isinstance(end, float) or abs(end) <= _WHOLE_FLOATS for end in ends)
    return Bounds(low, high, low_open, not high_closed, are_floats), int(multiple)


def _decimal(value: float) -> Decimal:
    return Decimal(repr(value))
