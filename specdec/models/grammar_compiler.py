"""Grammars of structured outputs, compiled for a model's tokens."""

import threading
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.models.grammar_source import grammar_source, not_followed
from specdec.models.grammar_tokens import GrammarTokens
from specdec.models.tokenizer import Tokenizer
from specdec.verify.grammar_state import Grammar, GrammarError, GrammarState

if TYPE_CHECKING:
    # Loaded with the first structured request.
    from llguidance import LLTokenizer

# Bytes of forms whose compiled grammars are kept for later requests; those of a large list of choices take some
# thirty times as many.
MOST_KEPT = 1 << 20
# What a form counts at least.
_LEAST = 1 << 12


class GrammarCompiler:
    """Compiles grammars with llguidance, and keeps those that were used last.

    Its methods may be called from several threads; they let other threads run.

    Args:
        vocab_size: columns of the model's logits.
        end_tokens: tokens after which the model's output ends.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self.tokenizer, self.vocab_size, self.end_tokens = tokenizer, vocab_size, end_tokens
        self._lock = threading.Lock()
        # The least recently used first; and those that something else holds.
        self._kept: dict[StructuredOutputsParams, Grammar] = {}
        self._held: WeakValueDictionary[StructuredOutputsParams, Grammar] = WeakValueDictionary()

    def known(self, params: StructuredOutputsParams) -> Grammar | None:
        """Return the grammar if it is compiled already."""
        with self._lock:
            grammar = self._held.get(params)
            if grammar is not None and self._kept.pop(params, None) is not None:
                self._kept[params] = grammar
            return grammar

    def compile(self, params: StructuredOutputsParams, source: str | None = None) -> Grammar:
        """Return the compiled grammar.

        Args:
            source: of the form, if it is made already.

        Raises:
            ValueError: an invalid schema, regular expression or grammar; names it and the reason.
        """
        if (grammar := self.known(params)) is not None:
            return grammar
        try:
            grammar = Grammar(source or grammar_source(params), self.tokens)
        except GrammarError as error:
            raise not_followed(params.shown_form, str(error)) from None
        # Unless another thread was faster.
        with self._lock:
            grammar = self._held.setdefault(params, grammar)
            if params.num_bytes <= MOST_KEPT:
                self._kept[params] = grammar
            while sum(max(form.num_bytes, _LEAST) for form in self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            return grammar

    def state(self, grammar: Grammar, num_prompt: int, end_tokens: frozenset[int]) -> GrammarState:
        """Return the state of a new request.

        Args:
            num_prompt: tokens of the prompt.
            end_tokens: tokens that end this request. Those that are text are possible where the grammar has that
                text; the others, and the model's own, where it is complete.
        """
        stops = self.end_tokens | (end_tokens & self.tokenizer.special_tokens)
        return GrammarState(grammar, stops, num_prompt, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text within an output."""
        # Alone, the text may get a space before it, as in Llama 2.
        begin, found = self._tokens_of("\n"), self._tokens_of(f"\n{text}")
        return found[len(begin) :] if found[: len(begin)] == begin else self._tokens_of(text)

    def _tokens_of(self, text: str) -> list[int]:
        return list(self.tokenizer.backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def token_texts(self) -> GrammarTokens:
        """The text of every token."""
        return self.tokenizer.grammar_tokens(self.vocab_size, self.end_tokens)

    @cached_property
    def tokens(self) -> "LLTokenizer":
        """The same as the library has it."""
        return self.token_texts.library_tokens()
