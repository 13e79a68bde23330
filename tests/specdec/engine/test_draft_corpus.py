"""Texts that drafts come from at start."""

import logging
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from specdec.building.draft_corpus import check_corpus
from specdec.building.resolved_config import resolved_config
from tests.specdec.tiny_checkpoints import Tiny

PROMPT = "the cat sat on"
SETTINGS: dict[str, Any] = {"dtype": "float64", "adaptive_drafts": False, "max_model_len": 64}


def test_drafts_come_from_the_corpus_for_every_salt(tiny: Tiny, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(tiny.target, "suffix", **SETTINGS) as llm:
        (first,) = llm.generate([PROMPT], params)
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        file = tmp_path / "corpus.txt"
        file.write_text(PROMPT + tokenizer.decode(first.token_ids), encoding="utf-8")
    with LLM(tiny.target, "suffix", draft_corpus=file, **SETTINGS) as llm:
        for salt in (None, "a", "b"):
            (output,) = llm.generate([PROMPT], params, cache_salt=salt)
            assert output.token_ids == first.token_ids
            assert sum(output.outputs[0].accepted) > sum(first.outputs[0].accepted) + 5


def test_a_corpus_beyond_the_store_is_told(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "corpus.txt"
    file.write_text("the cat sat on the mat\n" * 200, encoding="utf-8")
    with caplog.at_level(logging.INFO, "specdec"):
        LLM(tiny.target, "suffix", draft_corpus=[str(file)], draft_store_tokens=2048, **SETTINGS).close()
    assert "draft store: 2048 tokens, 0.1 MiB" in caplog.text
    assert "tokens, draft_store_tokens is 2048: its beginning is not kept" in caplog.text


def test_what_is_no_corpus_is_refused_before_anything_is_loaded(tiny: Tiny, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for file, message in (
        (tmp_path / "none", "none', which cannot be read: No such file or directory"),
        (tmp_path, "which cannot be read: Is a directory"),
        (binary, "binary', which is no UTF-8 text; give text files"),
    ):
        with pytest.raises(ValueError, match=message):
            resolved_config(tiny.target, "suffix", {"draft_corpus": file})
    with pytest.raises(ValueError, match=r"draft_corpus is '.*binary'; it is for draft 'suffix'; leave it out"):
        resolved_config(tiny.target, "ngram", {"draft_corpus": (str(binary),)})
    check_corpus((), is_used=False)


def test_a_store_that_the_machine_has_no_memory_for_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=r"draft_store_tokens is 1073741824 \(41.5 GiB\); this machine has"):
        LLM(tiny.target, "suffix", draft_store_tokens=1 << 30, **SETTINGS)
