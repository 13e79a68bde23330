"""Regular expressions as grammars, of plain texts or of JSON texts. Pure Python.

Followed is what ECMAScript and Python read alike; where their character sets differ, characters of both. A schema's
pattern is searched, as JSON Schema has it: without `^` and `$`, any text may stand before and behind it.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeAlias

from specdec.json_schema.characters import ANY, LAST, Ranges, complement, in_json, union
from specdec.json_schema.gbnf import EMPTY, Alt, Node, Repeat, Seq

_ASCII_DIGITS: Ranges = ((48, 57),)
_ASCII_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACES: Ranges = (
    *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F)),
    *((0x205F, 0x205F), (0x3000, 0x3000)),
)
# Those of one of the languages only.
_OTHER_SPACES: Ranges = ((28, 31), (0x85, 0x85), (0xFEFF, 0xFEFF))
_LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_COUNT = re.compile(r"\{([0-9]+)(,?)([0-9]*)\}")
# Greatest count of a repetition.
_MOST = 10_000


class _Anchor(NamedTuple):
    char: str


class _Group(NamedTuple):
    """Alternatives, each of which is a sequence."""

    parts: list[list["_Item"]]


class _Set(NamedTuple):
    ranges: Ranges


class _Repeated(NamedTuple):
    item: "_Item"
    least: int
    most: int | None


_Item: TypeAlias = _Anchor | _Group | _Set | _Repeated
_Written: TypeAlias = Callable[[Ranges], Node]


def pattern_grammar(pattern: str) -> Node:
    """Return the JSON texts, without quotes, in which a pattern is found.

    Raises:
        ValueError: what of the pattern is not followed.
    """
    return _alternatives(_parsed(pattern), in_json, Repeat(in_json(ANY), 0, None))


def whole_pattern_grammar(pattern: str, written: _Written = in_json) -> Node:
    """Return the texts that a pattern matches as a whole: without quotes where they are JSON.

    Args:
        written: returns one of a set's characters as the texts have it.

    Raises:
        ValueError: what of the pattern is not followed.
    """
    return _alternatives(_parsed(pattern), written, EMPTY)


def literal_start(pattern: str) -> str:
    """Return the text with which every text begins in which a pattern is found, as far as it is seen easily."""
    (*others,) = _parsed(pattern).parts
    if len(others) != 1 or not others[0] or others[0][0] != _Anchor("^"):
        return ""
    found = ""
    for item in others[0][1:]:
        if not isinstance(item, _Set) or len(item.ranges) != 1 or item.ranges[0][0] != item.ranges[0][1]:
            break
        found += chr(item.ranges[0][0])
    return found


def _alternatives(group: _Group, written: _Written, beside: Node) -> Node:
    """Return alternatives that may have anchors at their ends.

    Args:
        written: see `whole_pattern_grammar`.
        beside: what may stand where there is no anchor.
    """
    found: list[Node] = []
    for items in group.parts:
        if len(items) == 1 and isinstance(items[0], _Group):
            found.append(_alternatives(items[0], written, beside))
            continue
        begins, ends = items[:1] == [_Anchor("^")], items[-1:] == [_Anchor("$")]
        middle = [_node(item, written) for item in items[begins : len(items) - ends]]
        found.append(Seq((*([] if begins else [beside]), *middle, *([] if ends or not items else [beside]))))
    return Alt(tuple(found))


def _node(item: _Item, written: _Written) -> Node:
    if isinstance(item, _Anchor):
        raise ValueError(f"{item.char!r} in the middle is not supported; write it at the pattern's ends alone")
    if isinstance(item, _Set):
        return written(item.ranges)
    if isinstance(item, _Repeated):
        part = _node(item.item, written)
        if item.most == 0:
            return EMPTY
        return Repeat(part, item.least, item.most)
    return Alt(tuple(Seq(tuple(_node(each, written) for each in items)) for items in item.parts))


def _parsed(pattern: str) -> _Group:
    parser = _Parser(pattern)
    group = parser.group()
    if parser.at < len(pattern):
        raise ValueError("')' has no '('; write '\\)'")
    return group


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def next(self) -> str:
        """Return the character at the place and go on; at the end, nothing."""
        self.at += 1
        return self.pattern[self.at - 1 : self.at]

    def sees(self, text: str) -> bool:
        """Go on behind a text if it is there."""
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def group(self) -> _Group:
        parts: list[list[_Item]] = [[]]
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            if self.sees("|"):
                parts.append([])
            else:
                parts[-1].append(self.quantified(self.item()))
        return _Group(parts)

    def item(self) -> _Item:
        char = self.next()
        if char in "^$":
            return _Anchor(char)
        if char == ".":
            return _Set(complement(_LINE_ENDS))
        if char == "[":
            return _Set(self.bracket())
        if char == "\\":
            return _Set(self.escape(in_bracket=False)[0])
        if char == "(":
            return self.inner_group()
        if char in "*+?":
            raise ValueError(f"{char!r} stands behind nothing; write '\\{char}'")
        return _Set(_one(char))

    def inner_group(self) -> _Group:
        if self.sees("?") and not self.sees(":"):
            name = re.compile(r"P?<\w+>").match(self.pattern, self.at)
            if not name:
                kind = self.pattern[self.at : self.at + 2]
                what = "lookahead" if kind[:1] in ("=", "!") else "lookbehind" if kind in ("<=", "<!") else "a group"
                raise ValueError(f"{what} '(?{kind}' is not supported; write the pattern without it")
            self.at = name.end()
        group = self.group()
        if not self.sees(")"):
            raise ValueError("'(' has no ')'; write '\\('")
        return group

    def quantified(self, item: _Item) -> _Item:
        count = _COUNT.match(self.pattern, self.at)
        char = self.pattern[self.at : self.at + 1]
        if count:
            self.at = count.end()
            # Python makes no number of thousands of digits.
            least, end = (int(each) if len(each) < 10 else _MOST + 1 for each in (count[1], count[3] or "0"))
            most = end if count[3] else None if count[2] else least
            if max(least, end) > _MOST:
                raise ValueError(f"'{count[0]:.50}' is not supported; repeat at most {_MOST} times")
            if most is not None and most < least:
                raise ValueError(f"'{count[0]}' has no number of times; write the smaller one first")
        elif char and char in "*+?":
            self.at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif self.pattern.startswith("{,", self.at):
            raise ValueError("'{,' is not supported; write '{0,'")
        else:
            return item
        if isinstance(item, _Anchor):
            raise ValueError(f"{item.char!r} cannot be repeated; leave the count out")
        self.sees("?")
        if self.pattern[self.at : self.at + 1] in ("*", "+", "?") or _COUNT.match(self.pattern, self.at):
            raise ValueError("a count behind a count is not supported; put the first into '(?:…)'")
        return _Repeated(item, least, most)

    def bracket(self) -> Ranges:
        negated, found = self.sees("^"), list[Ranges]()
        if self.pattern.startswith("]", self.at):
            raise ValueError("'[]' is not supported; write ']' as '\\]'")
        while not self.sees("]"):
            char = self.next()
            if not char:
                raise ValueError("'[' has no ']'; write '\\['")
            sets = self.escape(in_bracket=True) if char == "\\" else (_one(char), _one(char))
            ranges = sets[negated]
            if self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
                self.at += 1
                char = self.next()
                end = self.escape(in_bracket=True)[0] if char == "\\" else _one(char) if char else ()
                if _size(ranges) != 1 or _size(end) != 1 or end[0][0] < ranges[0][0]:
                    raise ValueError("a range in '[]' has an end that is no character; write '-' as '\\-'")
                ranges = ((ranges[0][0], end[0][0]),)
            found.append(ranges)
        return complement(union(*found)) if negated else union(*found)

    def escape(self, *, in_bracket: bool) -> tuple[Ranges, Ranges]:
        """Return characters that an escape has in both languages, and in one of them."""
        char = self.next()
        if char and char in "dwsDWS":
            least, most = _classes()[char.lower()]
            return (least, most) if char.islower() else (complement(most), complement(least))
        if char in _CONTROLS:
            return (_one(chr(_CONTROLS[char])),) * 2
        if char == "b" and in_bracket:
            return (_one("\b"),) * 2
        if char == "0" and not self.pattern[self.at : self.at + 1].isdigit():
            return (_one("\0"),) * 2
        if char in ("x", "u"):
            size = 2 if char == "x" else 4
            digits = self.pattern[self.at : self.at + size]
            if re.fullmatch(rf"[0-9A-Fa-f]{{{size}}}", digits) and not 0xD800 <= int(digits, 16) <= 0xDFFF:
                self.at += size
                return (_one(chr(int(digits, 16))),) * 2
        elif char and not char.isalnum():
            return (_one(char),) * 2
        raise ValueError(f"'\\{char}' is not supported; write the pattern without it")


def _one(char: str) -> Ranges:
    return ((ord(char), ord(char)),)


def _size(ranges: Ranges) -> int:
    return sum(last - first + 1 for first, last in ranges)


@cache
def _classes() -> dict[str, tuple[Ranges, Ranges]]:
    """Return the characters of `\\d`, `\\w` and `\\s` in both languages, and in one of them."""
    # Each script has ten in a row, so each tenth character finds one of them; a look at all takes half a second.
    found = [code for code in range(0, LAST + 1, 10) if chr(code).isdecimal()]
    near = (code for each in found for code in range(each - 9, each + 10))
    digits = union((code, code) for code in near if chr(code).isdecimal())
    beyond_ascii = ((128, LAST),)
    return {
        "d": (_ASCII_DIGITS, digits),
        "w": (_ASCII_WORD, union(_ASCII_WORD, beyond_ascii)),
        "s": (_SPACES, union(_SPACES, _OTHER_SPACES)),
    }
