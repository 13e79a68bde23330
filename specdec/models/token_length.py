"""Characters that one token can stand for, by which a text is known to be too long before it is tokenized."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, models

from specdec.text.token_texts import BYTE_CHARACTERS

# Bytes that occur in UTF-8.
_UTF8 = frozenset((*range(0xC0), *range(0xC2, 0xF5)))
# Normalizers that make no text shorter, and those that compose characters: of four at most, Unicode's longest
# canonical decomposition.
_KEEPING = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")
_COMPOSING = ("NFC", "NFKC")
_MOST_COMPOSED = 4
_SPLITTING = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
_SPLITTING_BY = ("Split", "Punctuation")


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return how many characters of a text one token stands for at most.

    Returns:
        None if there is no such number, or it cannot be told: tokenizers drop blanks or characters, or take any word
        for one unknown token.
    """
    normalizers = _parts(_state(tokenizer.normalizer), "normalizers")
    splits = _parts(_state(tokenizer.pre_tokenizer), "pretokenizers")
    factor, is_byte_level = _shrinking(normalizers), any(part["type"] == "ByteLevel" for part in normalizers + splits)
    if factor is None or not _keeps_all(splits) or not _has_all(tokenizer, is_byte_level):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    # These take the blanks beside them as well.
    if any(one.lstrip or one.rstrip for one in added):
        return None
    return factor * max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _state(part: Any) -> Mapping[str, Any] | None:
    """Return a part of a tokenizer as tokenizer.json has it."""
    if part is None:
        return None
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _parts(state: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if state is None:
        return []
    return [one for part in state[name] for one in _parts(part, name)] if state["type"] == "Sequence" else [state]


def _shrinking(normalizers: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many characters can become one, None if that has no limit or is not known."""
    factor = 1
    for part in normalizers:
        kind = part["type"]
        if kind in _COMPOSING:
            factor *= _MOST_COMPOSED
        elif kind == "Replace":
            replaced = part["pattern"].get("String")
            if replaced is None or len(part["content"]) < len(replaced):
                return None
        elif kind not in _KEEPING:
            return None
    return factor


def _keeps_all(splits: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a text is split without losing a character."""
    return all(
        part["type"] in _SPLITTING or (part["type"] in _SPLITTING_BY and part["behavior"] != "Removed")
        for part in splits
    )


def _has_all(tokenizer: Tokenizer, is_byte_level: bool) -> bool:
    """Return whether every character becomes a token of its own or a part of a known one."""
    model = tokenizer.model
    names = tokenizer.get_vocab(with_added_tokens=False)
    # Others take a word, or several unknown characters, for one token.
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback and all(f"<0x{byte:02X}>" in names for byte in range(0x100)):
        return True
    if is_byte_level and all(char in names for char, byte in BYTE_CHARACTERS.items() if byte in _UTF8):
        return True
    return model.unk_token in names and not model.fuse_unk
