"""Grammars of structured outputs, compiled for a model's tokens."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakValueDictionary

from specdec.core.json_schema.gbnf import Alt, Text, grammar_text
from specdec.core.json_schema.schema_grammar import schema_grammar
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.models.tokenizer import Tokenizer
from specdec.verify.grammar_state import Grammar, GrammarState

if TYPE_CHECKING:
    # Loaded with the first structured request.
    from xgrammar import CompiledGrammar
    from xgrammar import GrammarCompiler as Compiler

# Memory for compiled grammars that are kept for later requests; the least recently used go first.
CACHE_BYTES = 128 << 20
# Threads of one compilation, which runs beside the engine.
THREADS = 2
# Longest message of the grammar library that is shown.
_LONGEST_REASON = 200


class GrammarCompiler:
    """Compiles grammars with xgrammar (Dong et al. 2024), and keeps those that were used last.

    Its methods may be called from several threads; they let other threads run.

    Args:
        vocab_size: columns of the model's logits.
        end_tokens: tokens after which the model's output ends.
        is_shared: whether other ranks read the grammars; their text is then made here, and not within a step.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int], *, is_shared: bool = False
    ) -> None:
        self.tokenizer, self.vocab_size, self.end_tokens = tokenizer, vocab_size, end_tokens
        self.is_shared = is_shared
        # Those that something holds. The compiler keeps others too, and makes new objects of them.
        self._held: WeakValueDictionary[_Source, Grammar] = WeakValueDictionary()

    def check(self, params: StructuredOutputsParams) -> None:
        """Refuse what is no grammar.

        Raises:
            ValueError: an invalid schema, regular expression or grammar; names it and the reason.
        """
        from xgrammar import Grammar

        with _one_line_errors(params):
            source = _source(params)
            if source.kind == "regex":
                Grammar.from_regex(source.text)
            elif source.kind == "lark":
                Grammar.from_lark(source.text)
            else:
                Grammar.from_ebnf(source.text)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the compiled grammar; large schemas take seconds.

        Raises:
            ValueError: see `check`.
        """
        with _one_line_errors(params):
            source = _source(params)
            grammar = self._held.get(source)
            if grammar is None:
                grammar = self._held[source] = Grammar(self._compiled(source))
        if self.is_shared:
            _ = grammar.text
        return grammar

    def _compiled(self, source: "_Source") -> "CompiledGrammar":
        compiler, text = self._compiler, source.text
        if source.kind == "regex":
            return compiler.compile_regex(text)
        return compiler.compile_lark(text) if source.kind == "lark" else compiler.compile_grammar(text)

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
        return list(self.tokenizer.backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _compiler(self) -> "Compiler":
        from xgrammar import GrammarCompiler as Compiler

        info = self.tokenizer.grammar_info(self.vocab_size, self.end_tokens)
        return Compiler(info, max_threads=THREADS, cache_limit_bytes=CACHE_BYTES)


class _Source(NamedTuple):
    kind: Literal["regex", "lark", "gbnf"]
    text: str


def _source(params: StructuredOutputsParams) -> _Source:
    """Return a grammar as the text that is compiled."""
    if params.regex is not None:
        return _Source("regex", params.regex)
    if params.grammar is not None:
        return _Source("gbnf" if "::=" in params.grammar else "lark", params.grammar)
    if params.choice is not None:
        text = grammar_text(Alt(tuple(Text(text) for text in params.choice)), {})
        assert text is not None
        return _Source("gbnf", text)
    schema = {"type": "object"} if params.json is None else json.loads(str(params.json))
    return _Source("gbnf", schema_grammar(schema, in_one_line=params.disable_any_whitespace))


@contextmanager
def _one_line_errors(params: StructuredOutputsParams) -> Iterator[None]:
    """Raise the library's errors as a ValueError of one line, without the library's own places."""
    try:
        yield
    except RuntimeError as error:
        name = next((name for name in ("regex", "choice", "grammar") if getattr(params, name) is not None), "json")
        line = next(iter(str(error).splitlines()), "") or type(error).__name__
        reason = re.sub(r"^\[[\d:]+\] \S+: ", "", line).removeprefix("Check failed: ")[:_LONGEST_REASON]
        raise ValueError(f"structured_outputs.{name} cannot be followed: {reason}; correct it") from None
