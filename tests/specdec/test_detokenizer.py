"""Pieces of text against decoding it whole, and stop strings wherever they fall."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specdec.detokenizer import Detokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


@given(st.text(max_size=30), st.lists(st.booleans(), min_size=200, max_size=200))
def test_segments_join_to_the_text_and_split_no_character(text: str, flags: list[bool]) -> None:
    detokenizer = Detokenizer(TOKENIZER, ())
    shown = ""
    for token, accepted in zip(TOKENIZER.encode(text).ids, flags, strict=False):
        detokenizer.push(token, accepted)
        for segment in detokenizer.segments(final=False):
            shown += segment.text
        assert text.startswith(shown)
    shown += "".join(segment.text for segment in detokenizer.segments(final=True))
    assert shown == text == detokenizer.text


@given(
    text=st.text(alphabet="abx", max_size=25),
    stops=st.lists(st.text(alphabet="abx", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    """Against the plain search after every character; nothing shown is ever taken back."""
    detokenizer = Detokenizer(TOKENIZER, stops)
    shown = ""
    for count, token in enumerate(TOKENIZER.encode(text).ids, 1):
        stopped = detokenizer.push(token, False)
        hits = [text[:count].find(stop) for stop in stops if stop in text[:count]]
        assert stopped == bool(hits)
        shown += "".join(segment.text for segment in detokenizer.segments(final=stopped))
        if stopped:
            assert shown == detokenizer.text == text[: min(hits)]
            assert detokenizer.matched in stops
            return
        assert text.startswith(shown)
    shown += "".join(segment.text for segment in detokenizer.segments(final=True))
    assert shown == text


def test_flags_stay_with_their_text() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["zz"])
    for token, accepted in zip(TOKENIZER.encode("abzc").ids, [True, False, True, True], strict=True):
        detokenizer.push(token, accepted)
    assert [(s.text, s.accepted) for s in detokenizer.segments(final=True)] == [
        ("a", True),
        ("b", False),
        ("z", True),
        ("c", True),
    ]


@pytest.mark.parametrize("final", [True, False])
def test_without_a_tokenizer_there_is_no_text(final: bool) -> None:
    detokenizer = Detokenizer(None, ())
    assert detokenizer.push(3, True) is False
    assert detokenizer.segments(final) == []
    assert detokenizer.text == ""
