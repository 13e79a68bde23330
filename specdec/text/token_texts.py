"""Texts and bytes of single tokens, as they are in the middle of a text."""

import re
from functools import cached_property

from tokenizers import Tokenizer

from specdec.text.text_stream import REPLACEMENT

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Texts and bytes of single tokens.

    Decoded alone, a token of SentencePiece's kind loses the space that it begins with, and `▁true` has the text of
    `true`. So each is decoded after another one, whose text is left out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _special(self) -> dict[int, str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token: one.content for token, one in added.items() if one.special}

    @cached_property
    def _before(self) -> tuple[list[int], str]:
        """A token of plain text that others are decoded after, and its text."""
        for token in range(self._tokenizer.get_vocab_size(with_added_tokens=False)):
            name = self._tokenizer.id_to_token(token)
            # The bytes of tokens of single bytes join those of the tokens after them.
            if token not in self._special and name and not _BYTE.fullmatch(name):
                text = self._decode([token])
                if text.strip() and REPLACEMENT not in text:
                    return [token], text
        return [], ""

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def text(self, token: int) -> str:
        """Return a token's text; one that is a part of a character has replacement characters there."""
        if token in self._special:
            return self._special[token]
        tokens, before = self._before
        text = self._decode([*tokens, token])
        return text[len(before) :] if text.startswith(before) else self._decode([token])

    def name(self, token: int) -> str:
        """Return a token's text, or its name in the vocabulary where it is no whole character."""
        text = self.text(token)
        return text if text and REPLACEMENT not in text else self._tokenizer.id_to_token(token) or f"[{token}]"

    def part_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that is not whole characters; None for another, or if they are not known."""
        text, name = self.text(token), self._tokenizer.id_to_token(token)
        if REPLACEMENT not in text or name is None:
            return None
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        try:
            spelled = bytes(BYTE_CHARACTERS[char] for char in name)
        except KeyError:
            return None
        # Of another kind of tokenizer, or whole characters.
        is_whole = spelled.decode(errors="replace").encode() == spelled
        return None if is_whole or spelled.decode(errors="replace") != text else spelled


def _byte_alphabet() -> dict[str, int]:
    """Return the bytes that byte-level tokenizers (GPT-2's kind) write as these characters."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


# Bytes by the characters that stand for them in the vocabularies of byte-level tokenizers.
BYTE_CHARACTERS = _byte_alphabet()
