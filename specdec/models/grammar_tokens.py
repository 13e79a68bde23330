"""Texts of a tokenizer's tokens, as the grammar library reads them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Loaded with the first structured request.
    from llguidance import LLTokenizer


@dataclass
class GrammarTokens:
    """Texts of all tokens. The library's own reader refuses some tokenizers, and takes `<think>` for a special token.

    Attributes:
        tokens: UTF-8 of each, or a part of it; empty for one that no text has.
        special_token_ids: tokens that a grammar allows only where it names their numbers.
        end_tokens: tokens that end an output.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    end_tokens: list[int]
    bos_token_id: None = None

    @property
    def eos_token_id(self) -> int | None:
        """The first of the tokens that end an output."""
        return self.end_tokens[0] if self.end_tokens else None

    def __call__(self, _: str | bytes) -> list[int]:
        """Return no tokens of a text: grammars force none."""
        return []

    def library_tokens(self) -> "LLTokenizer":
        """Return the library's form of them."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self), eos_token=self.end_tokens or None)
