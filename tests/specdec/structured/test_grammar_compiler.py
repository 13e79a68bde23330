"""Compiled grammars that are kept for later requests."""

import gc
from pathlib import Path
from typing import cast

import pytest

from specdec import StructuredOutputsParams
from specdec.models.grammar_compiler import GrammarCompiler
from specdec.models.tokenizer import Tokenizer
from tests.specdec.metaspace_llama import VOCAB, ids, save_metaspace
from tests.specdec.structured.byte_grammars import END, ByteTokens

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_kept_grammars_have_at_most_so_many_bytes() -> None:
    """Those that were used last are kept. One that is larger than all of the cache is not."""
    forms = [StructuredOutputsParams(choice=[f"{letter}{word}" for word in range(30)]) for letter in "abcd"]
    plain = GrammarCompiler(cast(Tokenizer, ByteTokens()), END + 1, frozenset([END]))
    plain.compile(forms[0])
    most = 3 * plain.kept_bytes
    assert most > 0
    compiler = GrammarCompiler(cast(Tokenizer, ByteTokens()), END + 1, frozenset([END]), cache_bytes=most)
    for form in (0, 1, 2, 0, 3):
        compiler.compile(forms[form])
        assert compiler.kept_bytes <= most
    gc.collect()
    assert [compiler.known(form) is not None for form in forms] == [True, False, True, True]
    compiler.compile(StructuredOutputsParams(choice=[f"word {word}" for word in range(1000)]))
    gc.collect()
    assert [compiler.known(form) is not None for form in forms] == [True, False, True, True]


def test_forced_text_gets_no_space_before_it(tmp_path: Path) -> None:
    """Tokenizers of Llama 2's kind put one before a text that stands alone, and the grammar has none."""
    save_metaspace(tmp_path / "target")
    compiler = GrammarCompiler(Tokenizer(tmp_path / "target"), VOCAB, frozenset(ids("</s>")))
    state = compiler.state(compiler.compile(StructuredOutputsParams(choice=["x,s true"])), 1, frozenset())
    assert state.forced([0], [], 8, compiler.encode) == ids("x", ",", "s", "▁true")
    assert state.forced([0], ids("x"), 8, compiler.encode) == ids(",", "s", "▁true")
