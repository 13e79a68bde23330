"""Tokenizers of GGUF files: llama.cpp's tokens, its ends of answers, and every key applied, without effect or refused.

`llama_cpp_splits.json` holds what llama.cpp (xllamacpp 2026.10.11549) makes of texts under one name of each split,
from a vocabulary of all bytes and all pairs of them, in which a piece's borders show.
"""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.gguf import file as file_module
from specdec.gguf.splits import PLAIN_TEXT, SPLITS
from specdec.gguf.tokenizer import WITHOUT_EFFECT, pieces_of
from specdec.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from specdec.models.checkpoint import read_settings
from specdec.models.generation_config import GenerationConfig
from specdec.models.tokenizer import Tokenizer, vocabulary_digest
from tests.specdec.gguf.gguf_writing import random_model, write_gguf

RECORDED = json.loads(Path(__file__).with_name("llama_cpp_splits.json").read_text(encoding="utf-8"))
ALPHABET = list(bytes_to_unicode().values())
# Which pair of bytes is merged first, as in the recorded vocabulary.
PAIRS = sorted(range(1 << 16), key=lambda pair: pair * 40503 % (1 << 16))


@pytest.fixture(scope="module")
def pairs() -> FastTokenizer:
    spelled = [(ALPHABET[pair >> 8], ALPHABET[pair & 255]) for pair in PAIRS]
    tokens = [*ALPHABET, *("".join(pair) for pair in spelled)]
    return FastTokenizer(models.BPE({text: token for token, text in enumerate(tokens)}, spelled))


@pytest.mark.parametrize("name", RECORDED["tokens"])
def test_splits_are_those_of_llama_cpp(pairs: FastTokenizer, name: str) -> None:
    pairs.pre_tokenizer = pieces_of(SPLITS[name])
    found = [encoding.ids for encoding in pairs.encode_batch(RECORDED["texts"])]
    assert dict(zip(RECORDED["texts"], found, strict=True)) == dict(
        zip(RECORDED["texts"], RECORDED["tokens"][name], strict=True)
    )


def test_all_splits_are_recorded() -> None:
    assert {SPLITS[name].patterns for name in RECORDED["tokens"]} == {split.patterns for split in SPLITS.values()}


def file_of(
    folder: Path,
    tokens: dict[str, int],
    values: dict[str, Any] | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
) -> Path:
    """Write a file with a tokenizer alone.

    Args:
        tokens: the type of each.
        values: further keys, behind `tokenizer.` where they do not begin with `general.`.
        merges: of a byte-level tokenizer.
        scores: of SentencePiece's kind.
    """
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2" if scores is None else "llama")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    if scores is None:
        writer.add_token_merges(merges or [ALPHABET[0] + " " + ALPHABET[0]])
    else:
        writer.add_token_scores(scores)
    for key, value in (values or {}).items():
        key = key if key.startswith("general.") else f"tokenizer.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


BYTES = {**dict.fromkeys(ALPHABET, NORMAL), ALPHABET[0] * 2: NORMAL}


def byte_level(folder: Path, *special: str, pre: str = "gpt-2", types: int = CONTROL, **values: Any) -> Path:
    """Write a byte-level tokenizer with further tokens, and keys behind `tokenizer.ggml.`."""
    ours = {f"ggml.{key}": value for key, value in {"pre": pre, **values}.items()}
    return file_of(folder, {**BYTES, **dict.fromkeys(special, types)}, ours)


def encoded(file: Path, text: str, **options: Any) -> list[str]:
    tokenizer = Tokenizer(file)
    return [str(tokenizer.backend.id_to_token(token)) for token in tokenizer.encode(text, **options)]


def test_the_example_of_the_readme_splits_digits_one_by_one(tmp_path: Path) -> None:
    merged = {"ĊĊ": NORMAL, "12": NORMAL, "Ġo": NORMAL}
    merges = ["Ċ Ċ", "1 2", "Ġ o"]
    for pre, expected in (("smollm", ["ĊĊ", "1", "2", ".", "Ġo"]), ("gpt-2", ["Ċ", "Ċ", "12", ".", "Ġo"])):
        file = file_of(tmp_path, {**dict.fromkeys(ALPHABET, NORMAL), **merged}, {"ggml.pre": pre}, merges)
        assert encoded(file, "\n\n12. o") == expected


@pytest.mark.parametrize("name", ["llama-5", "GPT-2", *PLAIN_TEXT])
def test_a_split_that_is_not_known_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        CheckpointError, match=rf"tokenizer.ggml.pre '{name}' .*; give the model's own with --tokenizer"
    ):
        Tokenizer(byte_level(tmp_path, pre=name))


def test_a_file_without_a_name_is_split_by_default_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Signs are pieces of their own, apart from spaces before them.
    merges, signs = ["Ġ +"], {"Ġ+": NORMAL}
    values = {**dict.fromkeys(ALPHABET, NORMAL), **signs}
    assert encoded(file_of(tmp_path, values, {"ggml.pre": "gpt-2"}, merges), "a +") == ["a", "Ġ+"]
    assert caplog.text == ""
    assert encoded(file_of(tmp_path, values, {}, merges), "a +") == ["a", "Ġ", "+"]
    assert "has no tokenizer.ggml.pre; its text is split as for 'default'" in caplog.text


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "gemma4", "plamo2"])
def test_other_kinds_of_tokenizers_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    file = file_of(tmp_path, BYTES, {})
    data = file.read_bytes()
    assert data.count(b"gpt2") == 1
    key = b"tokenizer.ggml.model" + (8).to_bytes(4, "little")
    start = data.index(key) + len(key)
    file.write_bytes(data[:start] + len(kind).to_bytes(8, "little") + kind.encode() + data[start + 12 :])
    with pytest.raises(CheckpointError, match=rf"tokenizer.ggml.model is '{kind}'; known: 'llama', 'gpt2'; give"):
        Tokenizer(file)


@pytest.mark.long
@given(
    key=st.from_regex(r"[a-z_]{3,12}(\.[a-z_]{3,12})?", fullmatch=True),
    prefix=st.sampled_from(["ggml.", "huggingface.", ""]),
)
def test_a_key_that_is_not_known_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, key: str, prefix: str
) -> None:
    name = prefix + key
    if name.startswith("chat_template."):
        return
    file = file_of(tmp_path_factory.mktemp("file"), BYTES, {"ggml.pre": "gpt-2", name: 1})
    with pytest.raises(CheckpointError, match=rf"tokenizer\.{name} is not supported; give the model's own with"):
        Tokenizer(file)


def test_keys_of_other_tokenizers_are_without_effect(tmp_path: Path) -> None:
    text = " two  spaces Éa"
    plain = encoded(byte_level(tmp_path), text)
    values: dict[str, Any] = {key: True if "_token_id" not in key else 5 for key in WITHOUT_EFFECT}
    assert encoded(byte_level(tmp_path, **{**values, "precompiled_charsmap": [1, 2]}), text) == plain


@pytest.mark.parametrize(
    ("special", "values", "expected"),
    [
        (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), {}, {"<|im_end|>", "<|endoftext|>"}),
        (("<s>", "<end_of_turn>"), {"eos_token_id": 3}, {"<end_of_turn>", ALPHABET[3]}),
        (("<repo_name>", "<reponame>", "<PAD>"), {}, {"<reponame>", "<PAD>"}),
        (("<PAD>",), {"fim_pad_token_id": 7}, {ALPHABET[7]}),
        (("<|end|>", "<|return|>", "<|call|>"), {}, {"<|return|>", "<|call|>"}),
        (("<|end|>", "<|calls|>", "<|flush|>"), {}, {"<|calls|>", "<|flush|>"}),
        (("<|end|>", "<|return|>"), {}, {"<|end|>", "<|return|>"}),
        (("</s>", "<turn|>"), {}, {"</s>", "<turn|>"}),
        (("</s>", "<|tool_response>"), {}, {"<|tool_response>"}),
        (("_<EOT>", "[EOS]"), {"eot_token_id": 8, "eom_token_id": 9}, {"_<EOT>", "[EOS]", *ALPHABET[8:10]}),
        (("<stop>",), {}, set()),
    ],
)
@pytest.mark.parametrize("types", [CONTROL, NORMAL])
def test_ends_of_answers_are_known_by_their_texts(
    tmp_path: Path, special: tuple[str, ...], values: dict[str, int], expected: set[str], types: int
) -> None:
    file = byte_level(tmp_path, *special, types=types, **values)
    tokens = [*BYTES, *special]
    assert {tokens[token] for token in GenerationConfig.read(file).end_tokens} == expected
    # They are found in a text, and stand for none.
    tokenizer = Tokenizer(file)
    for end in expected & {*special}:
        assert tokenizer.decode(tokenizer.encode(f"a{end}b")) == "ab"


def test_the_log_says_which_ends_a_file_does_not_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specdec")
    end = len(BYTES)
    GenerationConfig.read(byte_level(tmp_path, "<|im_end|>", eos_token_id=end))
    assert caplog.text == ""
    GenerationConfig.read(byte_level(tmp_path, "<|im_end|>", "<|eot_id|>", eos_token_id=end))
    assert f"names, and by their texts, as in llama.cpp: {end + 1} (<|eot_id|>)" in caplog.text


@pytest.mark.parametrize(
    ("pre", "values", "expected"),
    [
        ("gpt-2", {}, "h"),
        ("llama-bpe", {}, "<s>h"),
        ("llama-bpe", {"add_bos_token": False}, "h"),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, "<s>h</s>"),
        ("gpt-2", {"add_eos_token": True}, "h</s>"),
    ],
)
def test_beginnings_and_ends_are_added_as_the_file_says(
    tmp_path: Path, pre: str, values: dict[str, bool], expected: str
) -> None:
    ids = {"bos_token_id": len(BYTES), "eos_token_id": len(BYTES) + 1}
    file = byte_level(tmp_path, "<s>", "</s>", pre=pre, **ids, **values)
    assert "".join(encoded(file, "h")) == expected
    assert encoded(file, "h", add_special_tokens=False) == ["h"]


def test_a_beginning_that_the_file_does_not_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.bos_token_id is missing, which is to be added"):
        Tokenizer(byte_level(tmp_path, pre="llama-bpe"))


def test_types_of_tokens(tmp_path: Path) -> None:
    special = {"<c>": CONTROL, "<u>": USER_DEFINED, "<k>": UNKNOWN, "<n>": NORMAL}
    tokenizer = Tokenizer(file_of(tmp_path, {**BYTES, **special}, {"ggml.pre": "gpt-2", "ggml.eos_token_id": 257 + 3}))
    tokens = tokenizer.encode("a<c>b<u>c<k>d<n>")
    assert tokenizer.decode(tokens) == "ab<u>cd<n>"
    names = [tokenizer.backend.id_to_token(token) for token in tokens]
    assert names == ["a", "<c>", "b", "<u>", "c", "<k>", "d", "<", "n", ">"]


@pytest.mark.parametrize(
    ("tokens", "types", "message"),
    [
        (["a", "</s>", "a"], [NORMAL, CONTROL, NORMAL], "tokens 0 and 2 are both 'a'"),
        (["a", "</s>"], [NORMAL], r"tokenizer\.ggml\.token_type has 1 entries for 2 tokens"),
    ],
)
def test_a_vocabulary_that_makes_no_tokenizer_keeps_its_model(
    tmp_path: Path, tokens: list[str], types: list[int], message: str
) -> None:
    file = file_of(tmp_path, {}, {"ggml.pre": "gpt-2", "ggml.tokens": tokens, "ggml.token_type": types})
    assert read_settings(file)["eos_token_id"] == [1]
    assert GenerationConfig.read(file).end_tokens == {1}
    vocabulary_digest(file)
    with pytest.raises(CheckpointError, match=rf"{message}; give the model's own with --tokenizer FOLDER$"):
        Tokenizer(file)


def test_merges_are_ignored_for_whole_pieces_where_the_split_says_so(tmp_path: Path) -> None:
    tokens = {**dict.fromkeys(ALPHABET, NORMAL), "abc": NORMAL, "bc": NORMAL}
    for pre, expected in (("llama-bpe", ["abc"]), ("smaug-bpe", ["a", "bc"])):
        file = file_of(tmp_path, tokens, {"ggml.pre": pre, "ggml.add_bos_token": False}, ["b c"])
        assert encoded(file, "abc") == expected


def test_chat_templates_have_names(tmp_path: Path) -> None:
    templates = {"chat_template": "{{ messages[0].content }}", "chat_template.tool_use": "tools"}
    file = file_of(tmp_path, BYTES, {"ggml.pre": "gpt-2", "chat_templates": ["tool_use"], **templates})
    tokenizer = Tokenizer(file)
    message = [{"role": "user", "content": "hello"}]
    assert tokenizer.chat_text(message) == "hello"
    assert tokenizer.chat_text(message, tools=[{"type": "function", "function": {"name": "f"}}]) == "tools"


# Of SentencePiece's kind: pieces of a few letters with drawn scores.
PIECES = ["▁", "a", "b", "aa", "ab", "ba", "▁a", "▁b", "aab", "abab", "▁ab", "bb", "▁▁"]
HIDDEN = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
FALLBACK = {f"<0x{byte:02X}>": BYTE for byte in range(256)}


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """Merge as llama.cpp does, slowly: of all pairs that are a token, that of the best score."""
    parts = list(text.replace(" ", "▁"))
    while True:
        found = [(-scores[a + b], place) for place, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not found:
            break
        _, place = min(found)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    spelled = [[part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [each for part in spelled for each in part]


@pytest.mark.long
@given(data=st.data())
def test_pairs_of_the_best_score_are_merged_first(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(PIECES))))
    scores = {piece: -float(place) for piece, place in zip(PIECES, order, strict=True)}
    with_space = data.draw(st.booleans())
    tokens = {**HIDDEN, **FALLBACK, **dict.fromkeys(PIECES, NORMAL)}
    stored = [0.0] * (len(HIDDEN) + len(FALLBACK)) + list(scores.values())
    values = {} if with_space and data.draw(st.booleans()) else {"ggml.add_space_prefix": with_space}
    file = file_of(tmp_path_factory.mktemp("file"), tokens, values, scores=stored)
    tokenizer = Tokenizer(file)
    parts = data.draw(st.lists(st.text("ab é", min_size=1), min_size=1, max_size=3))
    space, expected = " " if with_space else "", ["<s>"]
    for place, part in enumerate(parts):
        expected += [*(["</s>"] if place else []), *merged(space + part, scores)]
    text = "</s>".join(parts)
    found = tokenizer.encode(text)
    assert [tokenizer.backend.id_to_token(token) for token in found] == expected
    if len(parts) == 1:
        assert tokenizer.decode(found) == text


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, reads = write_gguf(tmp_path / "model.gguf", random_model("llama")), []
    read = file_module.read_container
    monkeypatch.setattr(file_module, "read_container", lambda path: reads.append(path) or read(path))
    monkeypatch.setattr(gguf.GGUFReader, "__init__", None)
    read_settings(file)
    Tokenizer(file)
    GenerationConfig.read(file)
    file_module.GgufFile.open(file).weights(torch.float32)
    assert reads == [file]
