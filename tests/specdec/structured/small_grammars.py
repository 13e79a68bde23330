"""Small grammars over ten tokens, and what a fresh matcher says of them."""

import random
from collections.abc import Sequence
from functools import cache

from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo, allocate_token_bitmask

from specdec.verify.grammar_state import Grammar, GrammarState

# Token ids are places in this list; the last one ends an output.
TOKENS = ["a", "b", "c", "ab", "bc", "1", "2", "12", '"', "<end>"]
END = len(TOKENS) - 1
# More columns than tokens.
VOCAB = 41
GRAMMARS = ['"a" | "ab" | "abc1"', '[ab]+ "12"', '"a" root? "b"', '"\\"" [a-c1]{2,5} "\\""', '("ab" | "bc"){1,3} "1"?']
PROMPT = [8, 8]


@cache
def compiled(grammar: str) -> CompiledGrammar:
    info = TokenizerInfo([*TOKENS[:-1], ""], vocab_size=VOCAB, stop_token_ids=[END])
    return GrammarCompiler(info, max_threads=1).compile_grammar(f"root ::= {grammar}")


def encode(text: str) -> list[int]:
    """Greedy longest tokens."""
    found = []
    while text:
        token = max((t for t in TOKENS[:-1] if text.startswith(t)), key=len)
        found.append(TOKENS.index(token))
        text = text[len(token) :]
    return found


def state_of(grammar: str) -> GrammarState:
    return GrammarState(Grammar(compiled(grammar)), frozenset([END]), len(PROMPT), VOCAB)


def allowed_after(grammar: str, tokens: Sequence[int]) -> set[int]:
    """Tokens that a fresh matcher allows after all of these, none if it does not take them."""
    matcher = GrammarMatcher(compiled(grammar))
    for place, token in enumerate(tokens):
        if matcher.is_terminated():
            return {END} if set(tokens[place:]) == {END} else set()
        if not matcher.accept_token(token):
            return set()
    if matcher.is_terminated():
        return {END}
    mask = allocate_token_bitmask(1, VOCAB)
    matcher.fill_next_token_bitmask(mask)
    return {token for token in range(VOCAB) if int(mask[0, token // 32]) >> token % 32 & 1}


def random_output(grammar: str, seed: int, most: int) -> list[int]:
    generator, found = random.Random(seed), list[int]()
    while len(found) < most and (allowed := allowed_after(grammar, found) - {END}):
        found.append(generator.choice(sorted(allowed)))
    return found
