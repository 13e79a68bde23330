"""Bounds of the numbers of a JSON schema. Pure Python."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from specdec.json_schema.numbers import MOST_DIGITS, Bounds
from specdec.json_schema.schema import SchemaError, is_whole


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
        if end is not None and (end.adjusted() > MOST_DIGITS or int(end.as_tuple().exponent) < -MOST_DIGITS):
            raise SchemaError(place, f"the bound {end} is not supported; give it at most {MOST_DIGITS} digits")
    multiple = schema.get("multipleOf", 1)
    if not is_whole(multiple):
        raise SchemaError(place, f"multipleOf is {multiple}; only whole numbers are supported")
    return Bounds(low, high, low_open, not high_closed), int(multiple)


def _decimal(value: float) -> Decimal:
    return Decimal(repr(value))
