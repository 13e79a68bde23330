"""Bounds of the numbers of a JSON schema, and grammars of numbers between bounds. Pure Python."""

from collections.abc import Callable, Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import Any, NamedTuple, TypeAlias

from specdec.json_schema.gbnf import EMPTY, Alt, Chars, Node, Repeat, Rule, Text, alt, optional, seq
from specdec.json_schema.schema import SchemaError, is_whole

DIGIT = Chars(((48, 57),))
POSITIVE = seq(Chars(((49, 57),)), Repeat(DIGIT, 0, None))
WHOLE = seq(optional(Text("-")), alt(Text("0"), POSITIVE))
# Any number, with an exponent too.
NUMBER = seq(
    WHOLE,
    optional(seq(Text("."), Repeat(DIGIT, 1, None))),
    optional(seq(Chars(((69, 69), (101, 101))), optional(Chars(((43, 43), (45, 45)))), Repeat(DIGIT, 1, None))),
)
# Digits behind the point of a number with bounds, if the bounds have no more. A float tells numbers of 15 digits apart.
PLACES, EXACT = 6, 15
# Most values of `multipleOf` that are listed, and the greatest divisor without bounds.
MOST_LISTED = 1000
# Digits of a bound before the point and behind it: a grammar of more takes seconds to compile.
MOST_DIGITS, MOST_BEHIND = 400, 100
# Whole numbers up to this one are floats.
_WHOLE_FLOATS = 1 << 53
# Digits after which the rest of a number is a rule of its own: nodes within each other are read by recursion.
_DEEPEST = 16
# Makes a rule of a node.
Named: TypeAlias = Callable[[Node], Node]


class Bounds(NamedTuple):
    """Bounds of a number; None is no bound. An open one is outside.

    Attributes:
        are_floats: whether they are floats and not open, so that a number between them is one when it is read as float.
    """

    low: Decimal | None
    high: Decimal | None
    low_open: bool = False
    high_open: bool = False
    are_floats: bool = False

    def scaled(self, places: int) -> tuple[int | None, int | None]:
        """Return the least and the greatest number within the bounds, in units of that many decimal places."""
        low = high = None
        with localcontext() as context:
            context.prec = 2 * MOST_DIGITS
            if self.low is not None:
                exact = self.low.scaleb(places)
                low = int(exact.to_integral_value(ROUND_CEILING))
                low += self.low_open and low == exact
            if self.high is not None:
                exact = self.high.scaleb(places)
                high = int(exact.to_integral_value(ROUND_FLOOR))
                high -= self.high_open and high == exact
        return low, high


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


def whole_numbers(bounds: Bounds, named: Named, multiple: int = 1) -> Node | None:
    """Return whole numbers within bounds that are multiples; None if these are too many to list."""
    low, high = bounds.scaled(0)
    if multiple == 1:
        return WHOLE if low is None and high is None else _signed(low, high, 0, named)
    if low is not None and high is not None and (high - low) // multiple < MOST_LISTED:
        first = -(-low // multiple) * multiple
        return Alt(tuple(Text(str(value)) for value in range(first, high + 1, multiple)))
    return None


def multiples(multiple: int, rules: dict[str, Node]) -> tuple[Node, Node]:
    """Return the multiples above 0, and all of at least 0, by one rule per remainder added to `rules`."""

    def after(remainder: int) -> Node:
        return Rule(f"multiple-{multiple}-{remainder}")

    for remainder in range(multiple):
        parts = [seq(Text(str(digit)), after((10 * remainder + digit) % multiple)) for digit in range(10)]
        rules[f"multiple-{multiple}-{remainder}"] = alt(*([EMPTY] if remainder == 0 else []), *parts)
    positive = alt(*(seq(Text(str(digit)), after(digit % multiple)) for digit in range(1, 10)))
    return positive, alt(Text("0"), positive)


def numbers(bounds: Bounds, named: Named) -> Node:
    """Return decimal numbers within bounds, without exponents."""
    ends = [end for end in (bounds.low, bounds.high) if end is not None]
    if not ends:
        return NUMBER
    before = max(max(end.adjusted() + 1, 1) for end in ends)
    more = PLACES if bounds.are_floats else min(PLACES, EXACT - before)
    places = max(*(max(0, -int(end.as_tuple().exponent)) for end in ends), more, 0)
    low, high = bounds.scaled(places)
    return _signed(low, high, places, named)


def _signed(low: int | None, high: int | None, places: int, named: Named) -> Node:
    parts: list[Node] = []
    if high is None or high >= 0:
        parts.append(Alt(tuple(_unsigned(max(low or 0, 0), high, places, named))))
    if low is None or low < 0:
        least = 1 if high is None else max(-high, 1)
        parts.append(seq(Text("-"), Alt(tuple(_unsigned(least, None if low is None else -low, places, named)))))
    return Alt(tuple(parts))


def _unsigned(low: int, high: int | None, places: int, named: Named) -> Iterator[Node]:
    """Yield numbers from `low` to `high` in units of the last decimal place, by their digits before the point."""
    if high is not None and low > high:
        return
    size = max(len(str(low)) - places, 1)
    last = size if high is None else max(len(str(high)) - places, 1)
    for digits in dict.fromkeys((size, last)):
        least = 0 if digits == 1 else 10 ** (digits - 1 + places)
        most = 10 ** (digits + places) - 1
        first, end = max(low, least), most if high is None else min(high, most)
        yield _between(f"{first:0{digits + places}d}", f"{end:0{digits + places}d}", places, named)
    # Any number with more digits than the least and fewer than the greatest.
    if high is None or last > size + 1:
        fraction = optional(seq(Text("."), Repeat(DIGIT, 1, places))) if places else EMPTY
        yield seq(Chars(((49, 57),)), Repeat(DIGIT, size, None if high is None else last - 2), fraction)


def _between(low: str, high: str, places: int, named: Named) -> Node:
    """Return numbers between two of the same number of digits, the last `places` of which stand behind a point.

    Zeros at the end of a fraction may be there or not.
    """
    size = len(low)

    def ending(left: int, digit: Node = DIGIT) -> Node:
        """Any digits, or all the same one, in the last `left` places."""
        whole, fraction = max(left - places, 0), min(left, places)
        if not fraction:
            return Repeat(digit, whole, whole) if whole else EMPTY
        if left >= places:
            return seq(Repeat(digit, whole, whole), optional(seq(Text("."), Repeat(digit, 1, fraction))))
        return Repeat(digit, 0, fraction)

    def tail(at: int, is_low: bool, is_high: bool) -> Node:
        """Digits from place `at`, where those before are the bounds' so far."""
        left, starts_low = size - at, not is_low or not low[at:].strip("0")
        if starts_low and not (is_high and high[at:].strip("9")):
            return ending(left)
        if starts_low and not high[at:].strip("0"):
            return ending(left, Text("0"))
        can_end = left <= places and starts_low
        first = int(low[at]) if is_low else 0
        last = int(high[at]) if is_high else 9
        parts: list[Node] = []
        inner = list(range(first, last + 1))
        if is_low:
            parts.append(seq(Text(str(first)), after.get((True, is_high and first == last), EMPTY)))
            inner = [digit for digit in inner if digit != first]
        if is_high and inner:
            parts.append(seq(Text(str(last)), after.get((False, True), EMPTY)))
            inner = [digit for digit in inner if digit != last]
        if inner:
            parts.append(seq(Chars(((48 + inner[0], 48 + inner[-1]),)), ending(left - 1)))
        digits: Node = Alt(tuple(parts))
        if left == places:
            digits = seq(Text("."), digits)
        found = optional(digits) if can_end else digits
        return found if left % _DEEPEST else named(found)

    # Tails from the place after, by whether the digits before are those of the low and of the high bound.
    after: dict[tuple[bool, bool], Node] = {}
    for at in reversed(range(size)):
        ends = [(True, True)] if low[:at] == high[:at] else [(True, False), (False, True)]
        after = {end: tail(at, *end) for end in ends}
    return after[True, True]
