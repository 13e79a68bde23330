"""The characters that a token stands for at most: never exceeded where they are told, else not told."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from specdec.models.token_length import longest_token
from specdec.text.token_texts import BYTE_CHARACTERS

# Pairs that compose to one character, jamo that compose to one syllable, blanks, and characters outside vocabularies.
TEXTS = st.text("ab e\u0301\u0323\u0304\u1112\u1161\u11ab\ufb03\u00e9\u4e2d\U0001f600\n<", max_size=60)
UNK = "<unk>"


def byte_level(*merges: tuple[str, str]) -> models.BPE:
    """A model over bytes, of which some pairs are merged."""
    names = [*BYTE_CHARACTERS, *("".join(pair) for pair in merges)]
    return models.BPE({name: index for index, name in enumerate(names)}, list(merges))


def byte_fallback() -> models.BPE:
    names = [UNK, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab", "▁▁", "ab"]
    vocab = {name: index for index, name in enumerate(names)}
    return models.BPE(vocab, [("▁", "▁"), ("a", "b")], unk_token=UNK, fuse_unk=True, byte_fallback=True)


def letters(fuse: bool, unk: str | None = UNK) -> models.BPE:
    return models.BPE({UNK: 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")], unk_token=unk, fuse_unk=fuse)


def made(model: models.Model, split: object = None, normalizer: object = None, *added: AddedToken) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if split is not None:
        tokenizer.pre_tokenizer = split  # type: ignore[assignment]
    if normalizer is not None:
        tokenizer.normalizer = normalizer  # type: ignore[assignment]
    tokenizer.add_tokens(list(added))
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
BOUNDED = {
    "bytes": made(byte_level(("a", "b"), ("ab", "a")), BYTES),
    "bytes, composed": made(byte_level(("a", "b")), BYTES, normalizers.NFC(), AddedToken("<\u00e9")),
    "bytes, composed for compatibility": made(byte_level(), BYTES, normalizers.NFKC()),
    "bytes, split first": made(
        byte_level(), pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("a+"), "isolated"), BYTES])
    ),
    "byte fallback": made(byte_fallback(), None, SPACES, AddedToken("<ab", special=True)),
    "one unknown token a character": made(letters(fuse=False)),
}
UNBOUNDED = {
    "fused unknown characters": (made(letters(fuse=True)), "eeeeeeeeee"),
    "dropped characters": (made(letters(fuse=False, unk=None)), "eeeeeeeeee"),
    "dropped blanks": (made(letters(fuse=False), pre_tokenizers.WhitespaceSplit()), "a         "),
    "joined blanks": (made(letters(fuse=False), None, normalizers.Replace(Regex(" +"), " ")), "          "),
    "blanks of an added token": (made(letters(fuse=False), None, None, AddedToken("<", rstrip=True)), "<         "),
    "words": (made(models.WordLevel({UNK: 0}, unk_token=UNK)), "eeeeeeeeee"),
}


@given(text=TEXTS, name=st.sampled_from(sorted(BOUNDED)))
def test_no_token_stands_for_more(text: str, name: str) -> None:
    tokenizer = BOUNDED[name]
    longest = longest_token(tokenizer)
    assert longest is not None
    assert len(text) <= longest * len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(("name", "text"), [("bytes", "aba" * 9), ("bytes, composed", "<e\u0301" * 9)])
def test_the_bound_is_not_far_off(name: str, text: str) -> None:
    longest = longest_token(BOUNDED[name])
    assert longest is not None
    assert longest <= 4 * len(text) / len(BOUNDED[name].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(("tokenizer", "text"), UNBOUNDED.values(), ids=UNBOUNDED)
def test_none_where_a_token_may_stand_for_anything(tokenizer: Tokenizer, text: str) -> None:
    assert longest_token(tokenizer) is None
    assert _count(tokenizer, [text]) == _count(tokenizer, [text + text[-1] * 90])


def _count(tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
