"""Texts of grammars that are given as they are."""

import pytest

from specdec import StructuredOutputsParams
from specdec.models.grammar_source import GrammarSource, grammar_source

LARGE = 1 << 31


@pytest.mark.parametrize(
    "text",
    [
        f"start: /[^]]b{{2,{LARGE + 2}}}/",
        "start: /a{" + "9" * 5000 + ", }/",
        f'root ::= "a"{{0,{2 * LARGE + 2}}}',
        f'start: "a"~{LARGE}',
        f'start: "a" ~ 1..{LARGE}',
        f"start: /a{{{LARGE}}}/",
    ],
)
def test_counts_that_xgrammar_would_take_for_others_are_refused(text: str) -> None:
    """It holds them in 32 bits: of 2^32 + 2 it would make 2."""
    params = StructuredOutputsParams(grammar=text)
    with pytest.raises(
        ValueError, match=r"^structured_outputs\.grammar repeats \d+ times; counts must be below 2\^31$"
    ):
        grammar_source(params)


@pytest.mark.parametrize("text", [r"start: /a[\^b]/", r"start: /[\x5e]/", r'start: [ /\/[\u005eb]/ ] "a"'])
def test_sets_that_xgrammar_would_invert_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^structured_outputs\.grammar has \[\\\S+, which is not supported; begin the set"
    ):
        grammar_source(StructuredOutputsParams(grammar=text))


@pytest.mark.parametrize(
    "text",
    [
        f"start: /a{{{LARGE - 1}}}/",
        rf"start: /a\{{{LARGE}}}/",
        f"start: /[{{{LARGE}}}]/",
        "start: /" + "[" * 100_000,
        "start: /{" + " " * 100_000,
        r"start: /[a\^]\[\^[^\^]/ // [\^]",
        'start: "/[\\^]/"',
        r"root ::= [\^a]",
        f'root ::= "a{{{LARGE}}}"',
        f'root ::= "a\\"{{{LARGE}}}" [{{{LARGE}}}] {LARGE}',
        'root ::= "' + "a" * 100_000,
    ],
)
def test_what_only_looks_like_one_of_these_is_left_alone(text: str) -> None:
    params = StructuredOutputsParams(grammar=text)
    assert grammar_source(params) == GrammarSource("gbnf" if "::=" in text else "lark", text)
