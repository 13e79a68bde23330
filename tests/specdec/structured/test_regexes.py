"""Regular expressions of structured outputs, against Python's own."""

import re
from itertools import product
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from specdec import StructuredOutputsParams
from tests.profiles import num_cases
from tests.specdec.structured.byte_grammars import accepts, by_python, compiler, random_output

pytestmark = [pytest.mark.hypothesis, pytest.mark.slow]

SETS = [
    r"[\^a]",
    r"[\^]",
    r"[\x5e]",
    r"[\u005eb]",
    r"[^\^]",
    r"[^\^\n]",
    "[a^]",
    r"[a\-b]",
    r"[-a]",
    "[^a-b]",
    r"[^\W\d]",
]
ATOMS = ["a", "b", "1", r"\^", r"\.", r"\n", "-", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\x61", *SETS]
SHORT = ["".join(chars) for size in range(3) for chars in product("ab^-\n1", repeat=size)]


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds("({}{})".format, st.sampled_from(["", "?:", "?P<name>"]), inner)
    counted = st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "{0}", "+?"]))
    joined = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(group, counted, joined.map("".join), joined.map(lambda parts: f"(?:{'|'.join(parts)})"))


BODIES = st.recursive(st.sampled_from([*ATOMS, ""]), grown, max_leaves=6)
ANCHORED = st.builds("{}{}{}".format, st.sampled_from(["", "^"]), BODIES, st.sampled_from(["", "$"]))
PATTERNS = st.one_of(ANCHORED, st.lists(ANCHORED, min_size=2, max_size=3).map("|".join))


def is_known(pattern: str) -> bool:
    """Whether Python knows it: no group has the name of another."""
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


@pytest.mark.long
@given(PATTERNS.filter(is_known), st.lists(st.text("ab^-\n1._ é", max_size=6), max_size=10), st.integers(0, 99))
@settings(max_examples=num_cases(150))
def test_regexes_match_the_texts_that_they_match_in_python(pattern: str, texts: list[str], seed: int) -> None:
    expected = by_python(pattern)
    try:
        grammar = compiler().compile(StructuredOutputsParams(regex=pattern))
    except ValueError as error:
        # Anchors stand at the ends of the whole.
        if "|" not in pattern or "lookarounds not supported" not in str(error):
            raise
        event("refused")
        return
    assert all(accepts(grammar, text) == bool(expected.fullmatch(text)) for text in [*SHORT, *texts])
    output = random_output(grammar, seed)
    assert output is None or expected.fullmatch(output), output


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"yes\Z", "unrecognized escape sequence"),
        ("a$b", "lookarounds not supported"),
        ("b^a", "lookarounds not supported"),
        (r"\ba", "lookarounds not supported"),
        ("(?=a)b", "look-ahead .* is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        (r"\h", "unrecognized escape sequence"),
        (r"\N", "unrecognized escape sequence"),
        (r"\Qa", "unrecognized escape sequence"),
        ("a{3,1}", "the start must be <= the end"),
        ("a{" + "9" * 5000 + "}", "decimal literal invalid"),
        (r"[^\s\S]", "no text follows it"),
        ("(" * 100_000, "unclosed group"),
        ("(" * 5000 + "a" + ")" * 5000, "nest"),
        ("[" * 100_000, "unclosed character class"),
    ],
)
def test_what_is_not_followed_is_refused_in_one_line(pattern: str, reason: str) -> None:
    form: Any = StructuredOutputsParams(regex=pattern)
    with pytest.raises(ValueError, match=rf"^structured_outputs\.regex (cannot be followed: )?[^\n]*{reason}[^\n]*$"):
        compiler().compile(form)
