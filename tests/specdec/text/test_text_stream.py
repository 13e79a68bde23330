"""Text after a prompt against decoding both together."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from specdec.text.detokenizer import Detokenizer
from specdec.text.text_stream import REPLACEMENT, TextStream, WholeTokens
from specdec.text.token_texts import TokenTexts
from tests.specdec.metaspace_llama import TOKENIZER, WORD_IDS, byte_ids, ids
from tests.specdec.text.byte_level import MERGED, PIECES, spelled

WORDPIECE = Tokenizer(
    models.WordPiece({"[UNK]": 0, "[SEP]": 1, "the": 2, "cat": 3, "##s": 4, ",": 5}, unk_token="[UNK]")
)
WORDPIECE.decoder = decoders.WordPiece()
WORDPIECE.add_special_tokens(["[UNK]", "[SEP]"])


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], skip: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, (), skip_special=skip, prompt=prompt)
    shown = ""
    for token in tokens:
        detokenizer.push(token, False)
        shown += "".join(segment.text for segment in detokenizer.segments(final=False))
    shown += "".join(segment.text for segment in detokenizer.segments(final=True))
    assert shown == detokenizer.text
    return shown


def whole_after(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], skip: bool = True) -> str:
    before, whole = (tokenizer.decode(list(each), skip_special_tokens=skip) for each in (prompt, [*prompt, *tokens]))
    assert whole.startswith(before)
    return whole[len(before) :]


SPECIAL_IDS = ids("<s>", "</s>", "<think>")
WORDS_AND_SPECIAL = st.lists(st.sampled_from(WORD_IDS) | st.sampled_from(SPECIAL_IDS), max_size=12)


@given(WORDS_AND_SPECIAL, WORDS_AND_SPECIAL, st.integers(0, 60), st.booleans())
def test_text_goes_on_where_the_prompts_ends(prompt: list[int], tokens: list[int], many: int, skip: bool) -> None:
    """Also behind any number of special tokens."""
    prompt = [*prompt, *SPECIAL_IDS[:1] * many]
    assert text_after(TOKENIZER, prompt, tokens, skip) == whole_after(TOKENIZER, prompt, tokens, skip)


@given(st.lists(st.sampled_from([2, 3, 4, 5])), st.lists(st.sampled_from([1, 2, 3, 4, 5])))
def test_words_are_spaced_behind_a_prompt_of_wordpieces(prompt: list[int], tokens: list[int]) -> None:
    assert text_after(WORDPIECE, prompt, tokens) == whole_after(WORDPIECE, prompt, tokens)


@given(st.text(max_size=12), st.text(max_size=12), st.data())
def test_a_character_that_the_prompt_begins_is_the_outputs(before: str, after: str, data: st.DataObject) -> None:
    """With one token for each byte, cut anywhere; the character's first bytes are in the prompt."""
    text = before + after
    for tokens in (byte_ids(text), [MERGED.token_to_id(piece) for piece in spelled(text.encode())]):
        tokenizer = TOKENIZER if tokens == byte_ids(text) else MERGED
        cut = data.draw(st.integers(0, len(tokens)))
        complete = text.encode()[:cut].decode(errors="ignore")
        dropped = tokenizer is TOKENIZER and complete == "" and text.startswith(" ")
        assert text_after(tokenizer, tokens[:cut], tokens[cut:]) == text[len(complete) + dropped :]


SPECIAL_BYTES = Tokenizer.from_str(MERGED.to_str())
SPECIAL_BYTES.add_special_tokens(["<s>", "</s>"])
SPECIAL_BYTES.add_tokens(["<think>", "caf\u00e9"])


@pytest.mark.parametrize("tokenizer", [SPECIAL_BYTES, TOKENIZER, WORDPIECE], ids=["bytes", "spaces", "wordpieces"])
@given(data=st.data(), skip=st.booleans())
def test_tokens_decoded_once_for_all_streams_have_the_same_text(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    """Whole characters and parts of them, special tokens, and numbers that are no token, behind any prompt."""
    whole, tokens = WholeTokens(tokenizer), st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=12)
    kept = data.draw(st.sets(st.sampled_from([tokenizer.get_vocab_size() - i for i in range(1, 5)])))
    for _ in range(2):
        prompt, output = data.draw(tokens), data.draw(tokens)
        alone = TextStream(tokenizer, prompt, skip, kept)
        shared = TextStream(tokenizer, prompt, skip, kept, whole)
        for token in output:
            assert shared.step(token) == alone.step(token)
        assert shared.end() == alone.end()
    assert any(whole.values()) <= (tokenizer is SPECIAL_BYTES)


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        (ids("▁hello"), ids("▁world"), " world"),
        (ids("▁hello"), ids("▁", "▁x"), "  x"),
        (ids("▁hello", "</s>"), ids("▁world"), " world"),
        (ids("▁hello", "▁"), ids("x"), "x"),
        # Nothing is before it.
        (ids("<s>"), ids("▁hello", "▁world"), "hello world"),
        ([], ids("▁hello", "▁world"), "hello world"),
        # Bytes of the prompt that no token completes are its own.
        ([*ids("▁hello"), *byte_ids("€")[:2]], ids("x", "▁x"), "x x"),
        ([*ids("▁hello"), *byte_ids("你€")[:-1]], [*byte_ids("€")[2:], *ids("▁x")], "€ x"),
        ([*ids("▁hello"), *byte_ids("€")[:2]], [], ""),
        # No character, with a space behind it.
        (ids("▁hello"), [*byte_ids("é")[:1], *ids("▁world")], f"{REPLACEMENT} world"),
    ],
)
def test_text_is_right_at_the_end_of_the_prompt(prompt: list[int], tokens: list[int], text: str) -> None:
    assert text_after(TOKENIZER, prompt, tokens) == text


def test_a_token_of_the_prompt_may_begin_a_character_behind_text() -> None:
    token = MERGED.token_to_id("ĠcafÃ")
    rest = MERGED.token_to_id("©x")
    assert text_after(MERGED, [token], [rest]) == "éx"


def test_few_tokens_of_a_long_prompt_are_read() -> None:
    assert len(TextStream(TOKENIZER, ids("▁hello") * 1000).context) < 10
    assert len(TextStream(MERGED, PIECES[:1] * 1000).context) < 10


@pytest.mark.parametrize("stop", ["lo w", "hello", "o", " world x"])
def test_stop_strings_are_not_found_in_the_prompt(stop: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, [stop], prompt=ids("▁hello"))
    world, cat = ids("▁world", "▁cat")
    assert detokenizer.push(world, False) is (stop == "o")
    assert stop == "o" or detokenizer.push(cat, False) is False
    assert detokenizer.text == (" w" if stop == "o" else " world cat")


def test_tokens_of_one_letter_more_differ_in_their_text() -> None:
    texts = TokenTexts(TOKENIZER)
    named = ["▁true", "true", "▁", "▁▁", "</s>", "<0x41>"]
    assert [texts.text(token) for token in ids(*named)] == [" true", "true", " ", "  ", "</s>", "A"]
    assert [texts.part_bytes(token) for token in ids(*named)] == [None] * len(named)
    assert [TokenTexts(WORDPIECE).text(token) for token in range(1, 6)] == ["[SEP]", " the", " cat", "s", ","]


@given(st.text(min_size=1, max_size=5))
def test_bytes_of_tokens_join_to_those_of_their_text(text: str) -> None:
    for tokenizer, tokens in (
        (TOKENIZER, byte_ids(text)),
        (MERGED, [MERGED.token_to_id(c) for c in spelled(text.encode())]),
    ):
        texts = TokenTexts(tokenizer)
        parts = [texts.part_bytes(token) for token in tokens]
        own = [texts.text(token).encode() if part is None else part for token, part in zip(tokens, parts, strict=True)]
        assert b"".join(own) == text.encode()


def test_bytes_of_a_token_of_text_and_a_part_of_a_character() -> None:
    texts = TokenTexts(MERGED)
    assert texts.part_bytes(MERGED.token_to_id("ĠcafÃ")) == b" caf\xc3"
    assert texts.part_bytes(MERGED.token_to_id("ab")) is None
