"""Compiled grammars on their way to other ranks, which keep those that were used last."""

from specdec.core.commands import UseGrammar
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.verify.grammar_state import Grammar

# Characters of compiled grammars that readers keep for later requests; the least recently used go first. The one sent
# last is kept in any case.
MOST_KEPT = 128 << 20


class GrammarWriter:
    """Writes grammars for readers that get all of them; `GrammarCompiler.adopt` reads them."""

    def __init__(self) -> None:
        # Those that readers keep, the least recently used first.
        self._kept: dict[StructuredOutputsParams, Grammar] = {}

    def write(self, form: StructuredOutputsParams, grammar: Grammar) -> UseGrammar | None:
        """Return what makes readers have a grammar; None if they have it."""
        known = self._kept.pop(form, None)
        dropped = [] if known is not None else self._make_room(len(grammar.text))
        self._kept[form] = known or grammar
        return None if known is not None else UseGrammar(form, grammar.text, dropped)

    def _make_room(self, size: int) -> list[StructuredOutputsParams]:
        """Drop grammars until one more of `size` characters fits; return their forms."""
        size += sum(len(grammar.text) for grammar in self._kept.values())
        dropped = []
        for form, grammar in list(self._kept.items()):
            if size <= MOST_KEPT:
                break
            size -= len(grammar.text)
            dropped.append(form)
            del self._kept[form]
        return dropped
