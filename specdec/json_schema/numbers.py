"""Grammars of JSON numbers between bounds. Pure Python."""

from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import NamedTuple

from specdec.json_schema.gbnf import EMPTY, Alt, Chars, Node, Repeat, Rule, Text, alt, optional, seq

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
# Digits of a bound.
MOST_DIGITS = 400


class Bounds(NamedTuple):
    """Bounds of a number; None is no bound. An open one is outside."""

    low: Decimal | None
    high: Decimal | None
    low_open: bool = False
    high_open: bool = False

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


def whole_numbers(bounds: Bounds, multiple: int = 1) -> Node | None:
    """Return whole numbers within bounds that are multiples; None if these are too many to list."""
    low, high = bounds.scaled(0)
    if multiple == 1:
        return WHOLE if low is None and high is None else _signed(low, high, 0)
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


def numbers(bounds: Bounds) -> Node:
    """Return decimal numbers within bounds, without exponents."""
    ends = [end for end in (bounds.low, bounds.high) if end is not None]
    if not ends:
        return NUMBER
    before = max(max(end.adjusted() + 1, 1) for end in ends)
    places = max(*(max(0, -int(end.as_tuple().exponent)) for end in ends), min(PLACES, EXACT - before), 0)
    low, high = bounds.scaled(places)
    return _signed(low, high, places)


def _signed(low: int | None, high: int | None, places: int) -> Node:
    parts: list[Node] = []
    if high is None or high >= 0:
        parts.append(Alt(tuple(_unsigned(max(low or 0, 0), high, places))))
    if low is None or low < 0:
        least = 1 if high is None else max(-high, 1)
        parts.append(seq(Text("-"), Alt(tuple(_unsigned(least, None if low is None else -low, places)))))
    return Alt(tuple(parts))


def _unsigned(low: int, high: int | None, places: int) -> Iterator[Node]:
    """Yield numbers from `low` to `high` in units of the last decimal place, by their digits before the point."""
    if high is not None and low > high:
        return
    size = max(len(str(low)) - places, 1)
    last = size if high is None else max(len(str(high)) - places, 1)
    for digits in range(size, last + 1):
        least = 0 if digits == 1 else 10 ** (digits - 1 + places)
        most = 10 ** (digits + places) - 1
        first, end = max(low, least), most if high is None else min(high, most)
        yield _between(f"{first:0{digits + places}d}", f"{end:0{digits + places}d}", places)
    if high is None:
        fraction = optional(seq(Text("."), Repeat(DIGIT, 1, places))) if places else EMPTY
        yield seq(Chars(((49, 57),)), Repeat(DIGIT, last, None), fraction)


def _between(low: str, high: str, places: int) -> Node:
    """Return numbers between two of the same number of digits, the last `places` of which stand behind a point.

    Zeros at the end of a fraction may be there or not.
    """
    size = len(low)

    def ending(left: int) -> Node:
        """Any digits in the last `left` places."""
        whole, fraction = max(left - places, 0), min(left, places)
        if not fraction:
            return Repeat(DIGIT, whole, whole) if whole else EMPTY
        if left >= places:
            return seq(Repeat(DIGIT, whole, whole), optional(seq(Text("."), Repeat(DIGIT, 1, fraction))))
        return Repeat(DIGIT, 0, fraction)

    def tail(at: int, is_low: bool, is_high: bool) -> Node:
        """Digits from place `at`, where those before are the bounds' so far."""
        left = size - at
        if not (is_low or is_high):
            return ending(left)
        if left == 0:
            return EMPTY
        can_end = left <= places and (not is_low or not low[at:].strip("0"))
        first = int(low[at]) if is_low else 0
        last = int(high[at]) if is_high else 9
        parts: list[Node] = []
        inner = list(range(first, last + 1))
        if is_low:
            parts.append(seq(Text(str(first)), tail(at + 1, True, is_high and first == last)))
            inner = [digit for digit in inner if digit != first]
        if is_high and inner:
            parts.append(seq(Text(str(last)), tail(at + 1, False, True)))
            inner = [digit for digit in inner if digit != last]
        if inner:
            parts.append(seq(Chars(((48 + inner[0], 48 + inner[-1]),)), tail(at + 1, False, False)))
        digits: Node = Alt(tuple(parts))
        if left == places:
            digits = seq(Text("."), digits)
        return optional(digits) if can_end else digits

    return tail(0, True, True)
