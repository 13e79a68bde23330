"""Whatever class a folder names, its tokenizer.json is what tokenizes."""

import json
from itertools import product
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from specdec.models.tokenizer import Tokenizer

SPACE = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>"]
TEXTS = ["ab abc 1234567", "<s>it's  a\n\nb", "  ab</s> abc", "ab<s> abc"]
SPLITS = {
    "Llama 3's": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "single digits": r"\p{N}| ?[^\s\p{N}]+|\s+",
}
PREPENDED = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
# Normalizers and pre-tokenizers of SentencePiece models: Llama 2's, its later form, and Yi's.
SPACES = {
    "space in front of each part": (PREPENDED, None),
    "space in front of the text": (None, pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)),
    "no space in front": (None, pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)),
}
CLASSES = [None, "PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer"]
SETTINGS = [{}, {"add_bos_token": True, "legacy": False}, {"add_bos_token": False, "add_prefix_space": None}]


def form(name: str) -> FastTokenizer:
    if name in SPLITS:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = [*SPECIAL, *alphabet, "ab", "abc", "\u0120ab", "12", "123"]
        merges = [("a", "b"), ("ab", "c"), ("\u0120", "ab"), ("1", "2"), ("12", "3")]
        found = FastTokenizer(models.BPE(dict(zip(vocabulary, range(len(vocabulary)), strict=True)), merges))
        split = pre_tokenizers.Split(Regex(SPLITS[name]), "isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        found.pre_tokenizer, found.decoder = pre_tokenizers.Sequence([split, bytes_of]), decoders.ByteLevel()
    else:
        vocabulary = [
            *SPECIAL,
            *(f"<0x{byte:02X}>" for byte in range(256)),
            SPACE,
            *"abcits",
            "ab",
            "abc",
            SPACE + "ab",
        ]
        merges = [("a", "b"), ("ab", "c"), (SPACE, "ab")]
        ids = dict(zip(vocabulary, range(len(vocabulary)), strict=True))
        found = FastTokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        normalizer, pre_tokenizer = SPACES[name]
        if normalizer is not None:
            found.normalizer = normalizer
        if pre_tokenizer is not None:
            found.pre_tokenizer = pre_tokenizer
        plain = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        found.decoder = decoders.Sequence(plain if name == "no space in front" else [*plain, decoders.Strip(" ", 1, 0)])
    found.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    found.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return found


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", [*SPLITS, *SPACES])
def test_tokens_are_those_of_the_file(tmp_path: Path, name: str, family: str) -> None:
    form(name).save(str(tmp_path / "tokenizer.json"))
    wanted = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 512}))
    for tokenizer_class, settings in product(CLASSES, SETTINGS):
        own = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **settings}
        own |= {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
        tokenizer = Tokenizer(tmp_path)
        for text in TEXTS:
            tokens = wanted.encode(text).ids
            assert tokenizer.encode(text) == tokens, own
            assert tokenizer.encode(text, False) == tokens[1:], own
            assert tokenizer.decode(tokens) == wanted.decode(tokens), own


def test_ends_that_only_the_config_knows(tmp_path: Path) -> None:
    """A template writes them. What is null in the tokenizer's own file stays so, as Qwen's first token."""
    form("Llama 3's").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "bos_token_id": 1, "eos_token_id": [2, 0]})
    )
    own = {"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    texts = []
    for more in ({}, {"bos_token": None, "eos_token": "</s>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**own, **more}))
        texts.append(Tokenizer(tmp_path).chat_text([{"role": "user", "content": "ab"}]))
    assert texts == ["<s>ab", "ab</s>"]
