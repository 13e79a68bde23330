"""Tokenizers of GGUF files, which split and merge text as llama.cpp does."""

import logging
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.gguf.file import GgufFile
from specdec.gguf.splits import NO_NAME, PLAIN_TEXT, SPLITS, Split
from specdec.gguf.vocabulary import BYTE_LEVEL, NAMED_IDS, PREFIX, SENTENCEPIECE, GgufVocabulary

logger = logging.getLogger(__name__)

REMEDY = "give the model's own with --tokenizer FOLDER"
SPACE = "\u2581"
TEMPLATE, TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Special tokens of these models take the spaces behind them, but for three. No key says so.
PHI, PHI_PLAIN = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")
# Keys that are read here, with their endings behind `tokenizer.ggml.`.
APPLIED = (
    "model",
    "pre",
    "tokens",
    "token_type",
    "scores",
    "merges",
    "add_bos_token",
    "add_eos_token",
    "add_space_prefix",
    *(f"{name}_token_id" for name in NAMED_IDS),
)
# Keys without effect in llama.cpp on these kinds of tokenizers: they are for T5's, BERT's and RWKV's.
WITHOUT_EFFECT = (
    "add_sep_token",
    "seperator_token_id",
    "cls_token_id",
    "mask_token_id",
    "token_type_count",
    "remove_extra_whitespaces",
    "precompiled_charsmap",
    "normalizer.lowercase",
    "normalizer.strip_accents",
)
OTHERS_WITHOUT_EFFECT = ("tokenizer.huggingface.json", "tokenizer.rwkv.world")


def load_gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Build the tokenizer of a GGUF file.

    Raises:
        CheckpointError: a kind of tokenizer, a split or a key that is not known, by its name.
    """
    values = GgufFile.open(file).values
    try:
        _check_keys(values)
        vocabulary = GgufVocabulary.read(values)
        vocabulary.check()
        tokenizer = _sentencepiece(vocabulary) if vocabulary.kind == SENTENCEPIECE else _byte_level(file, vocabulary)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: the tokenizer cannot be read: {error}; {REMEDY}") from None
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    for name, ours in NAMED.items():
        if (token := vocabulary.id(name)) is not None:
            # Not given above, where it would be found in every text, whatever its type.
            setattr(found, ours, vocabulary.tokens[token])
    found.chat_template = _chat_template(values)
    return found


def _check_keys(values: dict[str, Any]) -> None:
    kind = values.get(f"{PREFIX}model")
    if kind not in (SENTENCEPIECE, BYTE_LEVEL):
        raise CheckpointError(f"{PREFIX}model is {kind!r}; known: {SENTENCEPIECE!r}, {BYTE_LEVEL!r}")
    known = {PREFIX + key for key in (*APPLIED, *WITHOUT_EFFECT)} | {*OTHERS_WITHOUT_EFFECT, TEMPLATES}
    if not values.get(f"{PREFIX}tokens"):
        raise CheckpointError(f"it has no {PREFIX}tokens")
    for key in values:
        is_template = key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
        if key.startswith("tokenizer.") and key not in known and not is_template:
            raise CheckpointError(f"{key} is not supported")


def _byte_level(file: Path, vocabulary: GgufVocabulary) -> Tokenizer:
    """Build a tokenizer of GPT-2's kind: byte-pair merges within the pieces of a split."""
    values = vocabulary.values
    name = values.get(f"{PREFIX}pre")
    if not name:
        logger.warning(f"{file}: it has no {PREFIX}pre; its text is split as for {NO_NAME!r}, as in llama.cpp")
        name = NO_NAME
    split = SPLITS.get(name)
    if split is None:
        why = "merges plain text instead of bytes, which" if name in PLAIN_TEXT else "names a split that"
        raise CheckpointError(f"{PREFIX}pre {name!r} {why} is not supported")
    merges = values.get(f"{PREFIX}merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"it has no {PREFIX}merges")
    # The first of two equal merges counts. A part may begin with a space, and ends before the next.
    pairs = [
        (merge[:1] + first, second)
        for merge in dict.fromkeys(merges)
        for first, _, second in [merge[1:].partition(" ")]
    ]
    try:
        model = models.BPE(vocabulary.ids, pairs, ignore_merges=split.ignores_merges)
    except Exception as error:  # tokenizers raises a bare Exception
        raise CheckpointError(f"{PREFIX}merges: {error}") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pieces_of(split)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special(tokenizer, vocabulary, split.adds_bos)


def pieces_of(split: Split) -> pre_tokenizers.PreTokenizer:
    """Return what splits a text into pieces, and writes their bytes in GPT-2's alphabet."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build a tokenizer of Llama 2's kind: of all pairs, that of the best score is merged first."""
    values, ids = vocabulary.values, vocabulary.ids
    scores = values.get(f"{PREFIX}scores")
    if scores is None or len(scores) < len(ids):
        raise CheckpointError(f"it has no {PREFIX}scores of its {len(ids)} tokens")
    scores = [float(score) for score in scores]
    merges = [
        (-scores[token], token, text[:place], text[place:])
        for text, token in ids.items()
        for place in range(1, len(text))
        if text[:place] in ids and text[place:] in ids
    ]
    merges.sort()
    unknown = vocabulary.id("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            [(first, second) for _, _, first, second in merges],
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    with_space = bool(values.get(f"{PREFIX}add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if with_space else spaces
    plain = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*plain, decoders.Strip(" ", 1, 0)] if with_space else plain)
    return _with_special(tokenizer, vocabulary, adds_bos=True)


def _with_special(tokenizer: Tokenizer, vocabulary: GgufVocabulary, adds_bos: bool) -> Tokenizer:
    """Add the special tokens, and those that every text begins and ends with.

    Raises:
        CheckpointError: a text is to have a token that the file does not name.
    """
    values = vocabulary.values
    is_phi = any(name in str(values.get("general.name")).lower() for name in PHI)
    added = []
    for token, hidden in sorted(vocabulary.special.items()):
        text = vocabulary.tokens[token]
        added.append(AddedToken(text, normalized=False, special=hidden, rstrip=is_phi and text not in PHI_PLAIN))
    tokenizer.add_tokens(added)
    whole, ids = ["$A"], []
    for name, adds in (("bos", adds_bos), ("eos", False)):
        if not values.get(f"{PREFIX}add_{name}_token", adds):
            continue
        end = vocabulary.id(name)
        if end is None:
            raise CheckpointError(f"{PREFIX}{name}_token_id is missing, which is to be added to each text")
        ids.append((vocabulary.tokens[end], end))
        whole.insert(0 if name == "bos" else len(whole), vocabulary.tokens[end])
    tokenizer.post_processor = processors.TemplateProcessing(whole, [*whole, "$B"], ids)
    return tokenizer


def _chat_template(values: dict[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or several by their names."""
    default = values.get(TEMPLATE)
    named = {key.removeprefix(f"{TEMPLATE}."): value for key, value in values.items() if key.startswith(f"{TEMPLATE}.")}
    if not named:
        return default
    return named if default is None else {"default": default, **named}
