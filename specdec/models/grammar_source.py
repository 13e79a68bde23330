"""Texts of grammars that xgrammar compiles, made of the forms that requests give."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

from specdec.core.call_grammar import calls_grammar
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.json_schema.converter import MOST_REPEATED
from specdec.json_schema.gbnf import grammar_text
from specdec.json_schema.schema import SchemaError
from specdec.json_schema.schema_grammar import schema_grammar
from specdec.json_schema.text_trees import text_tree
from specdec.kernels.types.settings import ParameterError

if TYPE_CHECKING:
    # Loaded with the first structured request.
    from xgrammar import CompiledGrammar, TokenizerInfo

# Longest message of the grammar library that is shown.
_LONGEST_REASON = 200
# Counts of repetitions in a regular expression, and what may only look like one: escapes and classes. In a grammar also
# strings, and Lark's own counts.
_COUNTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*+\]?|\{\s*+(\d*+)\s*+,?\s*+(\d*+)\s*+\}", re.DOTALL)
_GRAMMAR_COUNTS = re.compile(r'"(?:\\.|[^"\\])*+"?|~\s*+(\d++)(?:\s*+\.\.\s*+(\d++))?|' + _COUNTS.pattern, re.DOTALL)


class GrammarSource(NamedTuple):
    """A grammar as xgrammar reads it."""

    kind: Literal["regex", "lark", "gbnf"]
    text: str

    def compiled(self, tokens: "TokenizerInfo", num_threads: int) -> "CompiledGrammar":
        """Compile it. Other threads run meanwhile.

        Raises:
            RuntimeError: no grammar; see `one_line_errors`.
        """
        from xgrammar import GrammarCompiler

        # Grammars are kept by `specdec.models.grammar_compiler`.
        compiler = GrammarCompiler(tokens, max_threads=num_threads, cache_enabled=False)
        if self.kind == "regex":
            return compiler.compile_regex(self.text)
        return compiler.compile_lark(self.text) if self.kind == "lark" else compiler.compile_grammar(self.text)


def grammar_source(params: StructuredOutputsParams) -> GrammarSource:
    """Return a form as the text that is compiled. A pattern of a schema may take for ever.

    Raises:
        ValueError: a schema that cannot be followed, or a count that xgrammar would take for another.
    """
    if params.calls is not None:
        return GrammarSource("gbnf", calls_grammar(params.calls))
    if params.regex is not None:
        _check_counts(params.shown_form, params.regex, _COUNTS)
        return GrammarSource("regex", params.regex)
    if params.grammar is not None:
        _check_counts(params.shown_form, params.grammar, _GRAMMAR_COUNTS)
        return GrammarSource("gbnf" if "::=" in params.grammar else "lark", params.grammar)
    if params.choice is not None:
        text = grammar_text(text_tree(params.choice), {})
        assert text is not None
        return GrammarSource("gbnf", text)
    schema = {"type": "object"} if params.json is None else json.loads(str(params.json))
    try:
        return GrammarSource("gbnf", schema_grammar(schema, in_one_line=params.disable_any_whitespace))
    except SchemaError as error:
        raise ParameterError("structured_outputs", f"structured_outputs.json: {error}") from None
    except RecursionError:
        raise ParameterError("structured_outputs", "structured_outputs.json is nested too deeply; flatten it") from None


def _check_counts(name: str, text: str, counts: re.Pattern[str]) -> None:
    for found in counts.finditer(text):
        for count in filter(None, found.groups()):
            if len(count.lstrip("0")) > len(str(MOST_REPEATED)) or int(count) > MOST_REPEATED:
                message = f"{name} repeats {count:.50} times; counts must be below 2^31"
                raise ParameterError("structured_outputs", message)


@contextmanager
def one_line_errors(params: StructuredOutputsParams) -> Iterator[None]:
    """Raise the library's errors as a ValueError of one line, without the library's own places."""
    try:
        yield
    except RuntimeError as error:
        line = next(iter(str(error).splitlines()), "") or type(error).__name__
        reason = re.sub(r"^\[[\d:]+\] \S+: ", "", line).removeprefix("Check failed: ")[:_LONGEST_REASON]
        raise ParameterError(
            "structured_outputs", f"{params.shown_form} cannot be followed: {reason}; correct it"
        ) from None
