"""Grammars of a choice among many texts, as a prefix tree. Pure Python.

As a list of alternatives, xgrammar (0.2.8) takes time and memory by the square of their number, and every step of a
request looks at all of them.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby

from specdec.json_schema.gbnf import EMPTY, Alt, Node, Text, seq

# Most branches from the root to a leaf; below it the texts are a list of alternatives.
_DEEPEST = 40


def text_tree(texts: Iterable[str]) -> Node:
    """Return the grammar of a choice among texts."""
    return continued_texts(dict.fromkeys(texts, EMPTY))


def continued_texts(continued: Mapping[str, Node]) -> Node:
    """Return the grammar of a choice among texts, each followed by its own node."""
    return _tree(sorted(continued), continued, 0, 0)


def _tree(texts: list[str], continued: Mapping[str, Node], start: int, depth: int) -> Node:
    """Return the grammar of the texts behind their first `start` characters, which they share."""
    if len(texts) == 1:
        return _ending(texts[0], continued, start)
    if depth == _DEEPEST:
        return Alt(tuple(_ending(text, continued, start) for text in texts))
    first, last, end = texts[0], texts[-1], start
    while end < len(first) and first[end] == last[end]:
        end += 1
    groups = groupby(texts, lambda text: text[end : end + 1])
    branches = Alt(tuple(_tree(list(group), continued, end, depth + 1) for _, group in groups))
    return seq(Text(first[start:end]), branches) if end > start else branches


def _ending(text: str, continued: Mapping[str, Node], start: int) -> Node:
    rest = Text(text[start:])
    return rest if continued[text] == EMPTY else seq(rest, continued[text])
