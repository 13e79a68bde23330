"""Grammars of JSON schemas over tokens of bytes, compiled as a request's own."""

import random
import re
from functools import cache
from typing import Any, cast

import numpy as np

from specdec import StructuredOutputsParams
from specdec.models.grammar_compiler import GrammarCompiler
from specdec.models.grammar_tokens import GrammarTokens
from specdec.models.tokenizer import Tokenizer
from specdec.verify.grammar_state import Grammar

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

    def grammar_tokens(self, vocab_size: int, end_tokens: frozenset[int]) -> GrammarTokens:
        assert vocab_size == END + 1
        return GrammarTokens([*TOKENS, b"<end>"], [END], sorted(end_tokens))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(cast(Tokenizer, ByteTokens()), END + 1, frozenset([END]))


def compiled(schema: dict[str, Any], in_one_line: bool = True) -> Grammar:
    """A schema's grammar.

    Raises:
        ValueError: it is refused.
    """
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=in_one_line)
    return compiler().compile(params)


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a text is whole by the grammar."""
    matcher, tokens = grammar.matcher(), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def random_output(grammar: Grammar, seed: int, soon: int = SOON, most: int = MOST) -> str | None:
    """A text that the grammar accepts, by its masks; None if it has become too long."""
    generator, matcher, found = random.Random(seed), grammar.matcher(), b""
    for step in range(most):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(mask, bitorder="little")[: END + 1].nonzero()[0].tolist()
        assert allowed, (found, matcher.get_error())
        closing = [token for token in (END, *CLOSING) if token in allowed]
        if closing and (step > soon or generator.random() < 0.3):
            token = closing[0]
        else:
            # Most bytes begin or continue letters beyond ASCII.
            token = generator.choice([token for token in allowed if not 127 < token < 256 or token % 9 == 0] or allowed)
        if token == END:
            return found.decode()
        assert matcher.consume_token(token)
        found += TOKENS[token]
    return None


def by_python(pattern: str) -> "re.Pattern[str]":
    """Python's own, with `\\d` and `\\w` in ASCII and blanks as Unicode has them."""
    blanks = r"\s\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
    return re.compile(re.sub(r"\\[sS]", lambda set_: f"[{'^' * (set_[0][1] == 'S')}{blanks}]", pattern), re.ASCII)
