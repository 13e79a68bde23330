"""Texts of grammars that are given as they are."""

import pytest

from specdec import StructuredOutputsParams
from specdec.models.grammar_source import GrammarSource, grammar_source

LARGE = 1 << 31


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("regex", f"a{{{LARGE}}}"),
        ("regex", f"[^]]b{{2,{LARGE + 2}}}"),
        ("regex", "a{" + "9" * 5000 + ", }"),
        ("grammar", f'root ::= "a"{{0,{2 * LARGE + 2}}}'),
        ("grammar", f'start: "a"~{LARGE}'),
        ("grammar", f'start: "a" ~ 1..{LARGE}'),
        ("grammar", f"start: /a{{{LARGE}}}/"),
    ],
)
def test_counts_that_xgrammar_would_take_for_others_are_refused(form: str, text: str) -> None:
    """It holds them in 32 bits: of 2^32 + 2 it would make 2."""
    params = StructuredOutputsParams(**{form: text})  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=rf"^structured_outputs\.{form} repeats \d+ times; counts must be below 2\^31$"
    ):
        grammar_source(params)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("regex", f"a{{{LARGE - 1}}}"),
        ("regex", rf"a\{{{LARGE}}}"),
        ("regex", f"[{{{LARGE}}}]"),
        ("regex", "[" * 100_000),
        ("regex", "{" + " " * 100_000),
        ("grammar", f'root ::= "a{{{LARGE}}}"'),
        ("grammar", f'root ::= "a\\"{{{LARGE}}}" [{{{LARGE}}}] {LARGE}'),
        ("grammar", 'root ::= "' + "a" * 100_000),
    ],
)
def test_what_is_no_count_is_left_alone(form: str, text: str) -> None:
    params = StructuredOutputsParams(**{form: text})  # type: ignore[arg-type]
    assert grammar_source(params) == GrammarSource("regex" if form == "regex" else "gbnf", text)
