"""Grammars of JSON schemas over tokens of bytes, compiled as a request's own."""

from functools import cache
from typing import Any, cast

from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo

from specdec import StructuredOutputsParams
from specdec.models.grammar_compiler import GrammarCompiler
from specdec.models.tokenizer import Tokenizer

# Every byte, some longer texts, and the end.
TOKENS: list[bytes] = [
    *(bytes([byte]) for byte in range(256)),
    b'": ',
    b", ",
    b'",',
    b"null",
    b'{"',
    b'\\"',
    "é".encode(),
]
END = len(TOKENS)


class ByteTokens:
    """The part of a tokenizer that a compiler uses."""

    def grammar_info(self, vocab_size: int, end_tokens: frozenset[int]) -> TokenizerInfo:
        return TokenizerInfo([*TOKENS, b""], vocab_size=vocab_size, stop_token_ids=sorted(end_tokens))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(cast(Tokenizer, ByteTokens()), END + 1, frozenset([END]))


def compiled(schema: dict[str, Any], in_one_line: bool = True) -> CompiledGrammar:
    """A schema's grammar.

    Raises:
        ValueError: it is refused.
    """
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=in_one_line)
    return compiler().compile(params).compiled


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether a text is whole by the grammar."""
    matcher = GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(END)
