"""Grammars of structured outputs, compiled for a model's tokens."""

import threading
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from specdec.core.commands import UseGrammar
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.models.grammar_source import GrammarSource, grammar_source, one_line_errors
from specdec.models.tokenizer import Tokenizer
from specdec.verify.grammar_state import Grammar, GrammarState

if TYPE_CHECKING:
    # Loaded with the first structured request.
    from xgrammar import TokenizerInfo

# Bytes of compiled grammars that are kept for later requests by default.
CACHE_BYTES = 128 << 20
# Threads of one compilation, which runs beside the engine.
THREADS = 2


class GrammarCompiler:
    """Compiles grammars with xgrammar (Dong et al. 2024), and keeps those that were used last.

    Its methods may be called from several threads; they let other threads run.

    Args:
        vocab_size: columns of the model's logits.
        end_tokens: tokens after which the model's output ends.
        cache_bytes: most bytes of grammars that are kept; the least recently used go first.
        is_shared: whether other ranks read the grammars; their text is then made here, and not within a step.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_tokens: frozenset[int],
        *,
        cache_bytes: int = CACHE_BYTES,
        is_shared: bool = False,
    ) -> None:
        self.tokenizer, self.vocab_size, self.end_tokens = tokenizer, vocab_size, end_tokens
        self.cache_bytes, self.is_shared = cache_bytes, is_shared
        self._lock = threading.Lock()
        # The least recently used first; and those that something else holds.
        self._kept: dict[StructuredOutputsParams, Grammar] = {}
        self._held: WeakValueDictionary[StructuredOutputsParams, Grammar] = WeakValueDictionary()
        self._adopted: dict[StructuredOutputsParams, Grammar] = {}

    def known(self, params: StructuredOutputsParams) -> Grammar | None:
        """Return the grammar if it is compiled already."""
        with self._lock:
            grammar = self._held.get(params)
            if grammar is not None and self._kept.pop(params, None) is not None:
                self._kept[params] = grammar
            return grammar

    def compile(self, params: StructuredOutputsParams, source: GrammarSource | None = None) -> Grammar:
        """Return the compiled grammar; large schemas take seconds.

        Args:
            source: the form's text, if it is made already.

        Raises:
            ValueError: an invalid schema, regular expression or grammar; names it and the reason.
        """
        grammar = self.known(params)
        if grammar is None:
            with one_line_errors(params):
                grammar = Grammar((source or grammar_source(params)).compiled(self.tokens, THREADS))
            grammar = self._keep(params, grammar)
        if self.is_shared:
            _ = grammar.text
        return grammar

    def adopt(self, told: UseGrammar) -> None:
        """Have a grammar that another rank has compiled, until it says that it may be dropped."""
        from xgrammar import CompiledGrammar

        for form in told.dropped:
            del self._adopted[form]
        grammar = self.known(told.form) or Grammar(CompiledGrammar.deserialize_json(told.compiled, self.tokens))
        self._adopted[told.form] = self._keep(told.form, grammar)

    def _keep(self, params: StructuredOutputsParams, grammar: Grammar) -> Grammar:
        """Keep a grammar, unless another thread was faster; return the one that is kept."""
        with self._lock:
            grammar = self._held.setdefault(params, grammar)
            if _num_bytes(params, grammar) <= self.cache_bytes:
                self._kept[params] = grammar
            while self.kept_bytes > self.cache_bytes:
                del self._kept[next(iter(self._kept))]
            return grammar

    @property
    def kept_bytes(self) -> int:
        """Bytes of the grammars that are kept."""
        return sum(_num_bytes(params, grammar) for params, grammar in self._kept.items())

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
    def tokens(self) -> "TokenizerInfo":
        """The text of every token."""
        return self.tokenizer.grammar_info(self.vocab_size, self.end_tokens)


def _num_bytes(params: StructuredOutputsParams, grammar: Grammar) -> int:
    return params.num_bytes + grammar.num_bytes
