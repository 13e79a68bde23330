"""Small grammars over ten tokens and some special ones, and what a fresh matcher says of them."""

import random
from collections.abc import Sequence
from functools import cache

from llguidance import LLTokenizer, TokenizerWrapper

from specdec.verify.grammar_state import Grammar, GrammarState

# Token ids are places in this list; the last one ends an output.
TOKENS = ["a", "b", "c", "ab", "bc", "1", "2", "12", '"', "<end>"]
END = len(TOKENS) - 1
# Special tokens, which grammars name by their numbers.
SPECIAL = list(range(len(TOKENS), 14))
# More columns than tokens.
VOCAB = 41
GRAMMARS = [
    '"a" | "ab" | "abc1"',
    '/[ab]+/ "12"',
    '"a" start? "b"',
    '"\\"" /[a-c1]/{2,5} "\\""',
    '("ab" | "bc"){1,3} "1"?',
    '<[10]> "ab12" <[11]>+ | <[12]> /[ab]/',
]
PROMPT = [8, 8]


class _Tokens:
    """What llguidance reads of a tokenizer."""

    tokens = tuple(token.encode() for token in (*TOKENS, *(f"<{token}>" for token in SPECIAL)))
    special_token_ids, eos_token_id, bos_token_id = (END, *SPECIAL), END, None

    def __call__(self, text: bytes) -> list[int]:
        return encode(text.decode())


@cache
def compiled(grammar: str) -> Grammar:
    tokens = LLTokenizer(TokenizerWrapper(_Tokens()), n_vocab=VOCAB, eos_token=[END], slices=[])
    return Grammar(f'%llguidance {{"no_forcing": true}}\nstart: {grammar}', tokens)


def encode(text: str) -> list[int]:
    """Greedy longest tokens."""
    found = []
    while text:
        token = max((t for t in TOKENS[:-1] if text.startswith(t)), key=len)
        found.append(TOKENS.index(token))
        text = text[len(token) :]
    return found


def state_of(grammar: str) -> GrammarState:
    return GrammarState(compiled(grammar), frozenset([END]), len(PROMPT), VOCAB)


def allowed_after(grammar: str, tokens: Sequence[int]) -> set[int]:
    """Tokens that a fresh matcher takes after all of these, none if it does not take them."""
    matcher = compiled(grammar).matcher()
    for place, token in enumerate(tokens):
        if token == END:
            return {END} if matcher.is_accepting() and set(tokens[place:]) == {END} else set()
        if matcher.try_consume_tokens([token]) == 0:
            return set()
    found = {token for token in range(END + 1 + len(SPECIAL)) if token != END and matcher.validate_tokens([token])}
    return found | {END} if matcher.is_accepting() else found


def random_output(grammar: str, seed: int, most: int) -> list[int]:
    generator, found = random.Random(seed), list[int]()
    while len(found) < most and (allowed := allowed_after(grammar, found) - {END}):
        found.append(generator.choice(sorted(allowed)))
    return found
