"""Compiled grammars of structured outputs on their way to other processes, which keep those that were used last."""

from typing import TYPE_CHECKING, NamedTuple

from specdec.verify.grammar_state import Grammar, GrammarState

if TYPE_CHECKING:
    # Loaded with the first structured request.
    from xgrammar import TokenizerInfo

# Characters of compiled grammars that are kept for later requests; the least recently used go first.
MOST_KEPT = 128 << 20


class NewGrammar(NamedTuple):
    """A grammar that the reader does not have.

    Attributes:
        compiled: as xgrammar's JSON.
        tokens: the model's tokens likewise; None if a grammar was sent before.
        dropped: numbers of grammars that the reader need not keep any longer.
    """

    compiled: str
    tokens: str | None
    dropped: list[int]


class SentGrammar(NamedTuple):
    """A request's `GrammarState`, before any output.

    Attributes:
        number: the grammar's, among those of this writer.
        new: the grammar; None if the reader has it.
    """

    number: int
    new: NewGrammar | None
    stop_tokens: frozenset[int]
    vocab_size: int


class GrammarWriter:
    """Writes grammars for readers that get all of them.

    Args:
        most: characters of grammars that readers keep. The one sent last is kept in any case.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        # Those that readers keep, the least recently used first. Held grammars are found again by the compiler.
        self._kept: dict[Grammar, int] = {}
        self._next, self._most = 0, most

    def write(self, state: GrammarState) -> SentGrammar:
        """Return the state as it is sent."""
        grammar, new = state.grammar, None
        number = self._kept.pop(grammar, None)
        if number is None:
            number, self._next = self._next, self._next + 1
            tokens = None if number else grammar.compiled.tokenizer_info.serialize_json()
            new = NewGrammar(grammar.text, tokens, self._make_room(len(grammar.text)))
        self._kept[grammar] = number
        return SentGrammar(number, new, state.stop_tokens, state.vocab_size)

    def _make_room(self, size: int) -> list[int]:
        """Drop grammars until one more of `size` characters fits; return their numbers."""
        size += sum(len(grammar.text) for grammar in self._kept)
        dropped = []
        for grammar, number in list(self._kept.items()):
            if size <= self._most:
                break
            size -= len(grammar.text)
            dropped.append(number)
            del self._kept[grammar]
        return dropped


class GrammarReader:
    """Reads the grammars of one writer, all of them in their order."""

    def __init__(self) -> None:
        self._kept: dict[int, Grammar] = {}
        self._tokens: TokenizerInfo

    def read(self, sent: SentGrammar, num_prompt: int) -> GrammarState:
        """Return a state like the one that was written.

        Args:
            num_prompt: tokens of the request's prompt.
        """
        from xgrammar import CompiledGrammar, TokenizerInfo

        if sent.new is not None:
            compiled, tokens, dropped = sent.new
            if tokens is not None:
                self._tokens = TokenizerInfo.deserialize_json(tokens)
            for number in dropped:
                del self._kept[number]
            self._kept[sent.number] = Grammar(CompiledGrammar.deserialize_json(compiled, self._tokens))
        return GrammarState(self._kept[sent.number], sent.stop_tokens, num_prompt, sent.vocab_size)
