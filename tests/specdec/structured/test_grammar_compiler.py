"""Compiled grammars that are kept for later requests."""

import gc
from pathlib import Path
from typing import cast

import pytest

from specdec import StructuredOutputsParams
from specdec.models import grammar_compiler
from specdec.models.grammar_compiler import GrammarCompiler
from specdec.models.tokenizer import Tokenizer
from tests.specdec.metaspace_llama import VOCAB, ids, save_metaspace
from tests.specdec.structured.byte_grammars import END, ByteTokens

pytestmark = pytest.mark.slow


@pytest.fixture
def byte_compiler() -> GrammarCompiler:
    return GrammarCompiler(cast(Tokenizer, ByteTokens()), END + 1, frozenset([END]))


def test_kept_grammars_are_those_used_last(byte_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their forms have at most so many bytes. One that is larger than all of that is not kept."""
    forms = [StructuredOutputsParams(choice=[f"{letter}{word}" * 99 for word in range(30)]) for letter in "abcd"]
    monkeypatch.setattr(grammar_compiler, "MOST_KEPT", 3 * forms[0].num_bytes)
    for form in (0, 1, 2, 0, 3):
        byte_compiler.compile(forms[form])
    gc.collect()
    assert [byte_compiler.known(form) is not None for form in forms] == [True, False, True, True]
    byte_compiler.compile(StructuredOutputsParams(choice=[f"word {word}" * 99 for word in range(300)]))
    gc.collect()
    assert [byte_compiler.known(form) is not None for form in forms] == [True, False, True, True]


def test_many_small_forms_are_not_all_kept(byte_compiler: GrammarCompiler) -> None:
    """A compiled grammar takes some kB, however short its form is."""
    forms = [StructuredOutputsParams(regex=f"a{number}") for number in range(300)]
    for form in forms:
        byte_compiler.compile(form)
    gc.collect()
    assert [byte_compiler.known(form) is not None for form in forms] == [False] * 44 + [True] * 256


def test_a_grammar_that_is_held_is_found_again(byte_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MOST_KEPT", 0)
    form = StructuredOutputsParams(regex="a+")
    grammar = byte_compiler.compile(form)
    assert byte_compiler.compile(form) is grammar
    del grammar
    gc.collect()
    assert byte_compiler.known(form) is None


def test_forced_text_gets_no_space_before_it(tmp_path: Path) -> None:
    """Tokenizers of Llama 2's kind put one before a text that stands alone, and the grammar has none."""
    save_metaspace(tmp_path / "target")
    compiler = GrammarCompiler(Tokenizer(tmp_path / "target"), VOCAB, frozenset(ids("</s>")))
    state = compiler.state(compiler.compile(StructuredOutputsParams(choice=["x,s true"])), 1, frozenset())
    assert state.forced([0], [], 8, compiler.encode) == ids("x", ",", "s", "▁true")
    assert state.forced([0], ids("x"), 8, compiler.encode) == ids(",", "s", "▁true")
