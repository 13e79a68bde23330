"""Objects whose properties come in their order, each there or not, as a grammar of almost linear size. Pure Python."""

from collections.abc import Callable, Iterator

from specdec.json_schema.characters import json_text
from specdec.json_schema.gbnf import Alt, Node, Seq, Text, alt, seq
from specdec.json_schema.text_trees import continued_texts

# Properties up to which a part of an object has no rule of its own.
_SMALL = 4
# Nodes of a sequence that become a rule.
_LONG = 100


class PropertyChain:
    """The grammar of the inside of an object.

    Behind each property one of the next may follow, up to the next that has to be there. These are covered by parts of
    a binary tree over all properties, and the names of a part are a tree of common beginnings. So a step looks at a few
    parts, and not at all properties that may follow.

    Args:
        pairs: names and the grammars of their values.
        needed: names that have to be there.
        named: returns a rule with a body.
    """

    def __init__(
        self,
        pairs: list[tuple[str, Node]],
        needed: set[str],
        comma: Node,
        colon: Node,
        named: Callable[[Node], Node],
    ) -> None:
        self._pairs, self._comma, self._colon, self._named = pairs, comma, colon, named
        self._parts: dict[tuple[int, int], Node] = {}
        # What follows behind the properties before a place, of which some are there.
        self._behind: list[tuple[Node, ...]] = [()] * (len(pairs) + 1)
        # Behind each place, the first one that has to be there.
        self._needed = [len(pairs)] * (len(pairs) + 1)
        for place in range(len(pairs) - 1, -1, -1):
            self._needed[place] = place if pairs[place][0] in needed else self._needed[place + 1]

    def node(self, without: Node, behind: Node) -> Node:
        """Return the grammar.

        Args:
            without: what follows where no property is there.
            behind: what follows behind the last property.
        """
        size = len(self._pairs)
        self._behind[size] = (behind,)
        for place in range(size - 1, -1, -1):
            if self._needed[place] == place:
                nodes = (self._comma, Text(json_text(self._pairs[place][0])), *self._value_and_rest(place))
                self._behind[place] = (self._named(Seq(nodes)),) if len(nodes) > _LONG else nodes
            else:
                more = seq(self._comma, self._next(place))
                can_end = self._needed[place] == size
                self._behind[place] = (self._named(Alt((behind, more)) if can_end else more),)
        if not size:
            return without
        return Alt((without, self._next(0))) if self._needed[0] == size else self._next(0)

    def counted(self, endings: list[Node]) -> Node:
        """Return the grammar with a rule for each place and number of properties before it.

        Args:
            endings: what follows behind the last property by the number of those that are there, up to one from which
                on it is the same.
        """
        top = len(endings) - 1
        known = {(len(self._pairs), count): ending for count, ending in enumerate(endings)}
        for place in range(len(self._pairs) - 1, -1, -1):
            key, value = self._pairs[place]
            pair = self._named(seq(Text(json_text(key)), self._colon, value))
            for count in range(min(place, top) + 1):
                found = seq(*([self._comma] if count else []), pair, known[place + 1, min(count + 1, top)])
                if self._needed[place] != place:
                    found = alt(known[place + 1, count], found)
                known[place, count] = self._named(found)
        return known[0, 0]

    def _next(self, place: int) -> Node:
        """Return one of the properties from a place up to the next that has to be there, and what follows it."""
        return Alt(tuple(self._cover(place, self._needed[place] + 1, 0, len(self._pairs))))

    def _cover(self, first: int, end: int, low: int, high: int) -> Iterator[Node]:
        """Yield the largest parts of the tree within `first` to `end`, of those within `low` to `high`."""
        if first <= low and high <= end:
            yield self._part(low, high)
        elif first < high and low < end:
            middle = (low + high) // 2
            yield from self._cover(first, end, low, middle)
            yield from self._cover(first, end, middle, high)

    def _part(self, low: int, high: int) -> Node:
        if (low, high) not in self._parts:
            names = {json_text(self._pairs[place][0]): place for place in range(low, high)}
            found = continued_texts({name: Seq(self._value_and_rest(place)) for name, place in names.items()})
            self._parts[low, high] = self._named(found) if high - low > _SMALL else found
        return self._parts[low, high]

    def _value_and_rest(self, place: int) -> tuple[Node, ...]:
        return (self._colon, self._pairs[place][1], *self._behind[place + 1])
