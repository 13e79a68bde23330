"""Texts of grammars that xgrammar compiles, made of the forms that requests give."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

from specdec.core.call_grammar import calls_grammar
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.json_schema.characters import in_text
from specdec.json_schema.converter import MOST_REPEATED
from specdec.json_schema.gbnf import grammar_text
from specdec.json_schema.patterns import whole_pattern_grammar
from specdec.json_schema.schema import SchemaError
from specdec.json_schema.schema_grammar import schema_grammar
from specdec.json_schema.text_trees import text_tree
from specdec.kernels.types.settings import ParameterError

if TYPE_CHECKING:
    # Loaded with the first structured request.
    from xgrammar import CompiledGrammar, TokenizerInfo

# Longest message of the grammar library that is shown.
_LONGEST_REASON = 200
_STRING, _SET = r'"(?:\\.|[^"\\])*+"?', r"\\.|\[(?:\\.|[^\]\\])*+\]?"
# Counts of repetitions in a grammar, Lark's own among them, and what may only look like one: strings, escapes and sets.
_COUNTS = re.compile(
    rf"{_STRING}|~\s*+(\d++)(?:\s*+\.\.\s*+(\d++))?|{_SET}|\{{\s*+(\d*+)\s*+,?\s*+(\d*+)\s*+\}}", re.DOTALL
)
# Lark's regular expressions, and what may only look like one: strings and comments.
_EXPRESSIONS = re.compile(rf"{_STRING}|//.*|/((?:\\.|[^/\\\n])++)/")
_SETS = re.compile(_SET, re.DOTALL)
# The beginning of a set that xgrammar (0.2.8) would invert.
_INVERTED = re.compile(r"\[\\(?:\^|(?:x|u00|U000000)5[eE])")


class GrammarSource(NamedTuple):
    """A grammar as xgrammar reads it."""

    kind: Literal["lark", "gbnf"]
    text: str

    def compiled(self, tokens: "TokenizerInfo", num_threads: int) -> "CompiledGrammar":
        """Compile it. Other threads run meanwhile.

        Raises:
            RuntimeError: no grammar; see `one_line_errors`.
        """
        from xgrammar import GrammarCompiler

        # Grammars are kept by `specdec.models.grammar_compiler`.
        compiler = GrammarCompiler(tokens, max_threads=num_threads, cache_enabled=False)
        return compiler.compile_lark(self.text) if self.kind == "lark" else compiler.compile_grammar(self.text)


def grammar_source(params: StructuredOutputsParams) -> GrammarSource:
    """Return a form as the text that is compiled. A pattern of a schema may take for ever.

    Raises:
        ValueError: a schema or a regular expression that cannot be followed, or what xgrammar would take for another.
    """
    if params.calls is not None:
        return GrammarSource("gbnf", calls_grammar(params.calls))
    if params.regex is not None:
        return GrammarSource("gbnf", _regex_text(params.regex))
    if params.grammar is not None:
        is_lark = "::=" not in params.grammar
        _check_counts(params.grammar)
        if is_lark:
            _check_sets(params.grammar)
        return GrammarSource("lark" if is_lark else "gbnf", params.grammar)
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


def _regex_text(regex: str) -> str:
    try:
        text = grammar_text(whole_pattern_grammar(regex, in_text), {})
        if text is None:
            raise ValueError("no text matches it; correct it")
    except ValueError as error:
        raise ParameterError("structured_outputs", f"structured_outputs.regex cannot be followed: {error}") from None
    except RecursionError:
        message = "structured_outputs.regex is nested too deeply; flatten it"
        raise ParameterError("structured_outputs", message) from None
    return text


def _check_counts(grammar: str) -> None:
    """Refuse counts that xgrammar holds in too few bits."""
    for found in _COUNTS.finditer(grammar):
        for count in filter(None, found.groups()):
            if len(count.lstrip("0")) > len(str(MOST_REPEATED)) or int(count) > MOST_REPEATED:
                message = f"structured_outputs.grammar repeats {count:.50} times; counts must be below 2^31"
                raise ParameterError("structured_outputs", message)


def _check_sets(grammar: str) -> None:
    """Refuse sets in Lark's regular expressions that xgrammar would invert."""
    for expression in filter(None, (found[1] for found in _EXPRESSIONS.finditer(grammar))):
        for found in _SETS.finditer(expression):
            if _INVERTED.match(found[0]):
                message = f"structured_outputs.grammar has {found[0]:.50}, which is not supported"
                raise ParameterError("structured_outputs", f"{message}; begin the set with another character than '^'")


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
