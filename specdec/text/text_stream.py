"""Incremental detokenization after the tokens of a prompt."""

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

# What decoders write for bytes that are no character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens of the prompt that are decoded first; more where these have no text.
_FEWEST = 8
# A character of UTF-8 has four bytes at most, so three tokens can hold the beginning of one.
_MOST_INCOMPLETE = 3


class WholeTokens(dict[int, str]):
    """Texts of tokens that bring the same text wherever they stand, by token; empty for others.

    A decoder of bytes (GPT-2's kind) joins the tokens' bytes, so a token of whole characters has its own text behind
    whole characters. It is decoded once for all outputs, instead of twice with the tokens around it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer if isinstance(tokenizer.decoder, ByteLevel) else None

    def __missing__(self, token: int) -> str:
        text = "" if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=True)
        self[token] = text = "" if REPLACEMENT in text else text
        return text


class TextStream:
    """Incremental text of an output's tokens, in whole characters.

    Decoders treat the beginning of a text differently: those of SentencePiece's kind drop its first space. So the
    prompt's last tokens are decoded together with the output, and their text is left out. A character that the prompt
    begins and the output completes belongs to the output.

    Args:
        context: the tokens before the first.
        skip_special: leave special tokens out.
        kept: special tokens that are not left out.
        whole: of the tokenizer, shared by its streams; None to decode every token with those around it.

    Attributes:
        context: the last tokens of it, as many as the text depends on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        skip_special: bool = True,
        kept: Collection[int] = (),
        whole: WholeTokens | None = None,
    ) -> None:
        self._tokenizer, self._skip_special, self._whole = tokenizer, skip_special, whole
        self._skipped: frozenset[int] = frozenset()
        if skip_special and kept:
            added = tokenizer.get_added_tokens_decoder()
            self._skipped = frozenset(token for token, one in added.items() if one.special and token not in kept)
            self._skip_special = False
        # Tokens that are text already, and the tokens after them, which are not yet.
        self._known: list[int] = []
        self._pending: list[int] = []
        # Possible texts of the known tokens. The first of them that the next text begins with is left out.
        self._prefixes: tuple[str, ...] = ("",)
        self.context: list[int] = []
        if context:
            self._begin_after(context)

    def _begin_after(self, tokens: Sequence[int]) -> None:
        size = _FEWEST
        text = self._decode(tokens[-size:])
        # Decoded from inside a character on, a text may be different.
        while size < len(tokens) and (not text or text.startswith(REPLACEMENT)):
            size *= 4
            text = self._decode(tokens[-size:])
        self.context = self._known = list(tokens[-size:])
        self._prefixes = (text,)
        for count in range(1, _MOST_INCOMPLETE + 1) if text.endswith(REPLACEMENT) else ():
            before = self._decode(self.context[:-count])
            if not before.endswith(REPLACEMENT):
                self._known, self._pending = self.context[:-count], self.context[-count:]
                complete = text.rstrip(REPLACEMENT) if text.startswith(before) else before
                self._prefixes = (text, complete)
                return

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._skipped:
            tokens = [token for token in tokens if token not in self._skipped]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special))

    def step(self, token: int) -> str:
        """Return the text that a token brings; none while its last character is incomplete."""
        if self._whole is not None and not self._pending and (whole := self._whole[token]):
            self._known, self._prefixes = [token], (whole,)
            return whole
        self._pending.append(token)
        text = self._decode(self._known + self._pending)
        if text.endswith(REPLACEMENT):
            return ""
        piece = self._behind_known(text)
        if piece is None:
            # After invalid bytes a byte-fallback decoder writes the valid bytes before them differently too. Their text
            # is out already: go on behind it.
            piece = self._decode(self._pending)
        if piece:
            self._known, self._pending = self._pending, []
            self._prefixes = (self._decode(self._known),)
        return piece

    def _behind_known(self, text: str) -> str | None:
        """Return the text behind that of the known tokens; None if it does not begin with it."""
        for prefix in self._prefixes:
            if text.startswith(prefix):
                return text[len(prefix) :]
        return None

    def end(self) -> str:
        """Return the text of the tokens held back for an incomplete last character, without that character."""
        text = self._decode(self._known + self._pending) if self._pending else ""
        self._pending = []
        rest = self._behind_known(text) or ""
        # A byte-fallback decoder writes one replacement character for each byte of it.
        by_byte = self._tokenizer.token_to_id("<0x00>") is not None
        return rest.rstrip(REPLACEMENT) if by_byte else rest.removesuffix(REPLACEMENT)
