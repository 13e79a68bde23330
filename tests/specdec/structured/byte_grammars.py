"""Grammars of JSON schemas over tokens of bytes, compiled as a request's own."""

import random
from functools import cache
from typing import Any, cast

import numpy as np
from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo, allocate_token_bitmask

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
# Tokens of a random output; beyond the first ones it closes what is open.
MOST, SOON = 400, 60
CLOSING = [TOKENS.index(char) for char in (b'"', b"]", b"}")]


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


def random_output(grammar: CompiledGrammar, seed: int, soon: int = SOON, most: int = MOST) -> str | None:
    """A text that the grammar accepts, by its masks; None if it has become too long."""
    generator, matcher, found = random.Random(seed), GrammarMatcher(grammar), b""
    mask = allocate_token_bitmask(1, END + 1)
    for step in range(most):
        matcher.fill_next_token_bitmask(mask)
        allowed = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")[: END + 1].nonzero()[0].tolist()
        assert allowed, found
        closing = [token for token in (END, *CLOSING) if token in allowed]
        if closing and (step > soon or generator.random() < 0.3):
            token = closing[0]
        else:
            # Most bytes begin or continue letters beyond ASCII.
            token = generator.choice([token for token in allowed if not 127 < token < 256 or token % 9 == 0] or allowed)
        assert matcher.accept_token(token)
        if token == END:
            return found.decode()
        found += TOKENS[token]
    return None
