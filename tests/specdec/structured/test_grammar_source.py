"""Texts of grammars that are given as they are."""

import pytest

from specdec import StructuredOutputsParams
from tests.specdec.structured.byte_grammars import accepts, compiler

LARGE = 1 << 32


def follows(grammar: str, text: str) -> bool:
    return accepts(compiler().compile(StructuredOutputsParams(grammar=grammar)), text)


@pytest.mark.parametrize(
    "text",
    [
        f"start: /[^]]b{{2,{LARGE + 2}}}/",
        "start: /a{" + "9" * 5000 + ", }/",
        f'root ::= "a"{{0,{LARGE + 2}}}',
        f'start: "a"~{LARGE + 1}',
        f'start: "a" ~ 1..{LARGE + 1}',
        f"start: /a{{{LARGE + 1}}}/",
        "start: /" + "[" * 100_000,
        "start: /{" + " " * 100_000,
        'root ::= "' + "a" * 100_000,
        'root ::= "a\\',
        r"root ::= [\^a]",
        "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
        "start: " + "(" * 5000 + '"a"' + ")" * 5000,
    ],
)
def test_what_is_not_followed_is_refused_in_one_line(text: str) -> None:
    """Also counts beyond 32 bits, of which others could be made."""
    with pytest.raises(ValueError, match=r"^structured_outputs\.grammar cannot be followed: [^\n]+; correct it$"):
        follows(text, "a")


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (r"start: /a[\^b]/", ["a^", "ab"], ["ac", "a"]),
        (r"start: /[\x5e]/", ["^"], ["a"]),
        (r'start: /\/[\u005eb]/ "a"', ["/^a", "/ba"], ["/a", "^a"]),
        (r"start: /a[\^]\[\^[^\^]/ // [\^]", ["a^[^b"], ["a^[^^"]),
        ('start: "/[\\\\^]/"', ["/[\\^]/"], ["^"]),
        (rf"start: /a\{{{LARGE}}}/", [f"a{{{LARGE}}}"], ["aa"]),
        (f"start: /[{{{LARGE}}}]/", ["{", "4", "}"], ["1"]),
        (r"root ::= [^a/]", ["b"], ["a", "/"]),
        (r"root ::= [\u0041\x42]", ["A", "B"], ["u", "0", "4"]),
        (r'root ::= "\u00411F\x42"', ["A1FB"], ["\u411fB"]),
        (r'root ::= "\\u0041\u4e2d" [\U0001F600]', [r"\u0041中😀"], [r"\A中😀"]),
        ('root ::= "a" | root "b" # c', ["a", "abb"], ["b"]),
        (f'root ::= "a{{{LARGE}}}"', [f"a{{{LARGE}}}"], ["a"]),
        (f'root ::= "a\\"{{{LARGE}}}" [{{{LARGE}}}] "{LARGE}"', [f'a"{{{LARGE}}}4{LARGE}'], [f"a4{LARGE}"]),
    ],
)
def test_what_only_looks_special_is_followed_as_it_is(grammar: str, texts: list[str], others: list[str]) -> None:
    assert [follows(grammar, text) for text in (*texts, *others)] == [True] * len(texts) + [False] * len(others)
