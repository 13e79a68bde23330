"""Pieces of text against decoding it whole, and stop strings wherever they fall."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from specdec.text.detokenizer import Detokenizer
from specdec.text.text_stream import REPLACEMENT
from tests.specdec.text.byte_level import ALPHABET, BYTES, MERGED, PIECES, byte_tokenizer

TOKENIZER = byte_tokenizer()
# Of letters, with one special token behind them, whose id this is.
END = len(ALPHABET)
WITH_END = byte_tokenizer()
WITH_END.add_special_tokens(["<end>"])


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


@given(st.text(max_size=20), st.lists(st.booleans(), min_size=100, max_size=100))
def test_it_does_not_matter_when_somebody_asks(text: str, asked: list[bool]) -> None:
    """Tokens wait to become text where no stop string is looked for, and only there."""
    waiting, searching = Detokenizer(TOKENIZER, ()), Detokenizer(TOKENIZER, ("no such string",))
    for token, asks in zip(TOKENIZER.encode(text).ids, asked, strict=False):
        for one in (waiting, searching):
            one.push(token, asks)
            if asks:
                one.settle()
        assert not asks or waiting.text == searching.text
    assert waiting.segments(final=True) == searching.segments(final=True)
    assert waiting.text == text


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


def run(tokenizer: Tokenizer, tokens: list[int], stop: Sequence[str] = (), asks: bool = True) -> str:
    """The text of all tokens, of which nothing shown is ever taken back."""
    detokenizer = Detokenizer(tokenizer, stop)
    shown = ""
    for token in tokens:
        if detokenizer.push(token, False):
            break
        if asks:
            shown += "".join(segment.text for segment in detokenizer.segments(final=False))
            assert detokenizer.text.startswith(shown)
    shown += "".join(segment.text for segment in detokenizer.segments(final=True))
    assert shown == detokenizer.text
    assert detokenizer.segments(final=True) == []
    return shown


@given(st.lists(st.sampled_from(BYTES) | st.sampled_from(PIECES), max_size=40), st.booleans())
def test_the_text_is_that_of_all_tokens_but_for_an_incomplete_last_character(tokens: list[int], asks: bool) -> None:
    whole = MERGED.decode(tokens)
    text = run(MERGED, tokens, asks=asks)
    assert text == whole or text + REPLACEMENT == whole
    assert whole.endswith(REPLACEMENT) or text == whole


@given(
    st.lists(st.sampled_from(BYTES) | st.sampled_from(PIECES), max_size=40),
    st.lists(st.text(alphabet="abxz! ", min_size=1, max_size=3), min_size=1, max_size=2),
)
def test_no_stop_string_is_in_a_text_held_back(tokens: list[int], stops: list[str]) -> None:
    text = run(MERGED, tokens, stops)
    whole = MERGED.decode(tokens)
    assert not any(stop in text for stop in stops)
    assert whole.startswith(text)
    if not any(stop in whole for stop in stops):
        assert whole in (text, text + REPLACEMENT)


def test_characters_before_an_incomplete_one_are_not_lost() -> None:
    token = MERGED.token_to_id("ĠcafÃ")
    assert run(MERGED, [token]) == " caf"
    assert run(MERGED, [token, token]) == " caf\N{REPLACEMENT CHARACTER} caf"
    assert run(MERGED, [token], [" c"]) == ""


def test_bytes_that_are_no_character_do_not_stop_a_byte_fallback_decoder() -> None:
    """It writes the bytes before them otherwise from then on, which tokenizers' stream refuses."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    assert run(tokenizer, [256, *"é".encode(), 0xC3, 257, *"€".encode(), 256]) == "aé\N{REPLACEMENT CHARACTER}b€ a"
    # Of a character's three bytes the last is missing.
    assert run(tokenizer, [256, *"é".encode(), 257, *"€".encode()[:2]]) == "aéb"


@pytest.mark.parametrize("final", [True, False])
def test_without_a_tokenizer_there_is_no_text(final: bool) -> None:
    detokenizer = Detokenizer(None, ())
    assert detokenizer.push(3, True) is False
    assert detokenizer.segments(final) == []
    assert detokenizer.text == ""


@given(
    text=st.text(alphabet="abx", max_size=25),
    stops=st.lists(st.text(alphabet="abx", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    least=st.integers(0, 12),
)
def test_stop_strings_count_from_some_token_on(text: str, stops: list[str], include: bool, least: int) -> None:
    """One that ends earlier is text like any other; with `include_stop` the text ends behind the one that counts."""
    detokenizer = Detokenizer(TOKENIZER, stops, include_stop=include)
    shown = ""
    for count, token in enumerate(TOKENIZER.encode(text).ids, 1):
        stopped = detokenizer.push(token, False, may_stop=count > least)
        hits = [stop for stop in stops if count > least and text[:count].endswith(stop)]
        assert stopped == bool(hits)
        shown += "".join(segment.text for segment in detokenizer.segments(final=stopped))
        if stopped:
            # Of several, the one that begins first.
            assert detokenizer.matched == max(hits, key=len)
            assert shown == detokenizer.text == text[: count if include else count - len(max(hits, key=len))]
            return
        assert text.startswith(shown)
    assert detokenizer.matched is None
    assert detokenizer.text == text


@pytest.mark.parametrize(
    ("include", "text", "segments"),
    [(False, "a", [("a", True)]), (True, "abc", [("a", True), ("b", False), ("c", True)])],
)
def test_a_token_may_reach_beyond_the_stop_string(include: bool, text: str, segments: list[tuple[str, bool]]) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "cde": 2}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    detokenizer = Detokenizer(tokenizer, ["bc"], include_stop=include)
    stopped = [detokenizer.push(token, accepted) for token, accepted in ((0, True), (1, False), (2, True))]
    assert stopped == [False, False, True]
    assert (detokenizer.text, detokenizer.matched) == (text, "bc")
    assert detokenizer.segments(final=True) == segments


def test_a_stop_string_that_did_not_count_does_not_count_later() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["ab"])
    a, b, c = TOKENIZER.encode("abc").ids
    assert [detokenizer.push(token, False, may_stop=token == c) for token in (a, b, c)] == [False, False, False]
    assert detokenizer.text == "abc"
    assert (detokenizer.push(a, False), detokenizer.push(b, False)) == (False, True)
    assert detokenizer.text == "abc"


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_text_where_they_are_not_skipped(skip: bool, text: str) -> None:
    a, b = WITH_END.encode("ab").ids
    detokenizer = Detokenizer(WITH_END, (), skip_special=skip)
    assert not any(detokenizer.push(token, True) for token in (a, END, b))
    assert detokenizer.text == text
    assert "".join(segment.text for segment in detokenizer.segments(final=True)) == text


@pytest.mark.parametrize(("skip", "stopped", "text"), [(True, False, "aend"), (False, True, "a<")])
def test_a_stop_string_in_a_special_token(skip: bool, stopped: bool, text: str) -> None:
    detokenizer = Detokenizer(WITH_END, ["end>"], skip_special=skip)
    detokenizer.push(*WITH_END.encode("a").ids, False)
    assert detokenizer.push(END, False) is stopped
    if not stopped:
        for token in WITH_END.encode("end").ids:
            assert not detokenizer.push(token, False)
    assert detokenizer.text == text


def test_texts_of_single_tokens() -> None:
    """Of special tokens too."""
    texts = Detokenizer(WITH_END, ["b"]).token_texts
    assert texts is not None
    a, b = WITH_END.encode("ab").ids
    # The last is the first of two bytes.
    tokens = [a, b, END, WITH_END.encode("é").ids[0]]
    assert [texts.text(token) for token in tokens] == ["a", "b", "<end>", "\N{REPLACEMENT CHARACTER}"]
    assert Detokenizer(None, ()).token_texts is None
