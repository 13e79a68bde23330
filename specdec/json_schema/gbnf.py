"""Context-free grammars as values, and their text in GBNF. Pure Python."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias


class Text(NamedTuple):
    """A fixed text."""

    text: str


class Token(NamedTuple):
    """One token by its number: a special token, which stands for no text."""

    number: int


class Chars(NamedTuple):
    """One character out of ranges of code points, both ends included."""

    ranges: tuple[tuple[int, int], ...]


class Seq(NamedTuple):
    """A sequence."""

    parts: tuple["Node", ...]


class Alt(NamedTuple):
    """A choice between nodes. Without nodes it matches no text."""

    parts: tuple["Node", ...]


class Repeat(NamedTuple):
    """A repetition, at least `least` times and, unless it is None, at most `most` times."""

    part: "Node"
    least: int
    most: int | None


class Rule(NamedTuple):
    """A reference to a rule by its name."""

    name: str


class Before(NamedTuple):
    """The body of a rule, with what may follow the rule: `following`, or the end of the text.

    It changes no text. The compiler uses it to mask tokens that reach beyond the rule.
    """

    part: "Node"
    following: "Node"


Node: TypeAlias = Text | Token | Chars | Seq | Alt | Repeat | Rule | Before

EMPTY = Text("")
NEVER = Alt(())
_COUNTS = {(0, None): "*", (1, None): "+", (1, 1): ""}


def seq(*parts: Node) -> Node:
    return Seq(parts)


def alt(*parts: Node) -> Node:
    return Alt(parts)


def optional(part: Node) -> Node:
    return Alt((EMPTY, part))


def chars(allowed: str) -> Node:
    return Chars(tuple((ord(char), ord(char)) for char in allowed))


def grammar_text(root: Node, rules: Mapping[str, Node]) -> str | None:
    """Return the grammar in GBNF without nodes that match no text; None if the root matches none."""
    rules = {**rules, "root": root}
    finite = _finite_rules(rules)
    if "root" not in finite:
        return None
    kept = {name: _pruned(node, finite) for name, node in rules.items() if name in finite}
    reached, waiting = {"root"}, ["root"]
    while waiting:
        for name in _names(kept[waiting.pop()]):
            if name not in reached:
                reached.add(name)
                waiting.append(name)
    return "\n".join(f"{name} ::= {written(node)}" for name, node in kept.items() if name in reached)


def matches_text(root: Node, rules: Mapping[str, Node]) -> bool:
    """Return whether a node matches some text."""
    return _is_finite(root, _finite_rules(rules))


def _finite_rules(rules: Mapping[str, Node]) -> set[str]:
    """Return the names of rules that match some text. A rule that always needs itself matches none."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, node in rules.items():
        for used in _names(node):
            users[used].add(name)
    # Most rules stand behind those that they need, and are looked at once.
    found, waiting = set[str](), OrderedDict.fromkeys(rules)
    while waiting:
        name, _ = waiting.popitem(last=False)
        if _is_finite(rules[name], found):
            found.add(name)
            waiting.update(dict.fromkeys(users[name] - found))
    return found


def _names(node: Node) -> Iterable[str]:
    if isinstance(node, Rule):
        yield node.name
    elif isinstance(node, Repeat | Before):
        yield from _names(node.part)
    elif isinstance(node, Seq | Alt):
        for part in node.parts:
            yield from _names(part)


def _is_finite(node: Node, finite: set[str]) -> bool:
    if isinstance(node, Rule):
        return node.name in finite
    if isinstance(node, Chars):
        return bool(node.ranges)
    if isinstance(node, Repeat):
        return node.least == 0 or _is_finite(node.part, finite)
    if isinstance(node, Before):
        return _is_finite(node.part, finite)
    if isinstance(node, Seq):
        return all(_is_finite(part, finite) for part in node.parts)
    return isinstance(node, Text | Token) or any(_is_finite(part, finite) for part in node.parts)


def _pruned(node: Node, finite: set[str]) -> Node:
    """Return a node without its parts that match no text."""
    if isinstance(node, Repeat):
        if node.most == 0 or not _is_finite(node.part, finite):
            return EMPTY
        return Repeat(_pruned(node.part, finite), node.least, node.most)
    if isinstance(node, Before):
        return Before(_pruned(node.part, finite), node.following)
    if isinstance(node, Seq):
        parts = [_pruned(part, finite) for part in node.parts]
        parts = [part for part in parts if part != EMPTY]
        return parts[0] if len(parts) == 1 else Seq(tuple(parts)) if parts else EMPTY
    if isinstance(node, Alt):
        found = [_pruned(part, finite) for part in node.parts if _is_finite(part, finite)]
        # A part may be there twice. Nodes of two types are equal as tuples.
        parts = list({written(part) if isinstance(part, Text | Rule) else id(part): part for part in found}.values())
        return parts[0] if len(parts) == 1 else Alt(tuple(parts))
    return node


def written(node: Node) -> str:
    """Return a node as it stands in a rule's body."""
    if isinstance(node, Rule):
        return node.name
    if isinstance(node, Text):
        return '"' + "".join(_escaped(ord(char), '"\\') for char in node.text) + '"'
    if isinstance(node, Token):
        return f"Token({node.number})"
    if isinstance(node, Chars):
        return "[" + "".join(_range(*ends) for ends in node.ranges) + "]"
    if isinstance(node, Seq):
        return "(" + " ".join(map(written, node.parts)) + ")"
    if isinstance(node, Alt):
        return "(" + " | ".join(map(written, node.parts)) + ")"
    if isinstance(node, Before):
        return f"{written(node.part)} (= {written(node.following)})"
    part = f"({written(node.part)})" if isinstance(node.part, Repeat) else written(node.part)
    if (node.least, node.most) in _COUNTS:
        return part + _COUNTS[node.least, node.most]
    return f"{part}{{{node.least},{'' if node.most is None else node.most}}}"


def _range(first: int, last: int) -> str:
    text = _escaped(first, "\\]^-")
    return text if first == last else f"{text}-{_escaped(last, chr(92) + ']^-')}"


def _escaped(code: int, special: str) -> str:
    if chr(code) in special:
        return "\\" + chr(code)
    if 32 <= code < 127:
        return chr(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
