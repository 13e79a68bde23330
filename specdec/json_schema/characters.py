"""Sets of characters, and how JSON writes them within a text. Pure Python."""

import json
from collections.abc import Iterable
from typing import TypeAlias

from specdec.json_schema.gbnf import Alt, Chars, Node, Text, alt, chars, seq

Ranges: TypeAlias = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
ANY: Ranges = ((0, LAST),)
# Characters that JSON does not take as they are: controls, quotes, backslashes; and halves of surrogate pairs.
_SURROGATES: Ranges = ((0xD800, 0xDFFF),)
_SPECIAL: Ranges = ((0, 31), (34, 34), (92, 92), *_SURROGATES)
_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, last in sorted(ends for each in sets for ends in each):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found, begin = [], 0
    for first, last in union(ranges):
        if first > begin:
            found.append((begin, first - 1))
        begin = last + 1
    return (*found, (begin, LAST)) if begin <= LAST else tuple(found)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    return complement((*complement(one), *complement(other)))


def in_text(allowed: Ranges) -> Node:
    """Return one of these characters, as a plain text has it."""
    return Chars(intersection(allowed, complement(_SURROGATES)))


def in_json(allowed: Ranges) -> Node:
    """Return one of these characters, each written in one way: its short escape, itself, or `\\u00…`."""
    plain = intersection(allowed, complement(_SPECIAL))
    parts: list[Node] = [Chars(plain)] if plain else []
    special = [chr(code) for first, last in intersection(allowed, _SPECIAL[:3]) for code in range(first, last + 1)]
    if short := [_SHORT[char] for char in special if char in _SHORT]:
        parts.append(seq(Text("\\"), chars("".join(short))))
    for digit in "01":
        rest = [f"{ord(char):02x}"[1] for char in special if char not in _SHORT and f"{ord(char):02x}"[0] == digit]
        if rest:
            parts.append(seq(Text(f"\\u00{digit}"), chars("".join(rest))))
    return Alt(tuple(parts))


def any_character() -> Node:
    """Return any character in any of JSON's spellings. A surrogate pair is one character, and no half stands alone."""
    digit = Chars(((48, 57), (65, 70), (97, 102)))
    below = seq(Chars(((48, 57), (65, 67), (69, 70), (97, 99), (101, 102))), digit, digit, digit)
    first = seq(chars("dD"), Chars(((48, 55),)), digit, digit)
    high = seq(chars("dD"), chars("89abAB"), digit, digit)
    low = seq(Text("\\u"), chars("dD"), chars("cdefCDEF"), digit, digit)
    unicode = seq(Text("u"), alt(below, first, seq(high, low)))
    return alt(Chars(complement(_SPECIAL)), seq(Text("\\"), alt(chars('"\\/bfnrt'), unicode)))


def json_text(text: str) -> str:
    """Return a text as JSON writes it, with its quotes. Non-ASCII characters stay as they are."""
    written = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(char):04x}" if 0xD800 <= ord(char) <= 0xDFFF else char for char in written)
