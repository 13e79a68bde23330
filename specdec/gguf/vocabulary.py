"""The vocabulary of a GGUF file: its tokens, their types, and those that end an answer, as llama.cpp takes them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specdec.draft_heads.llama.checkpoint_files import CheckpointError

PREFIX = "tokenizer.ggml."
# Types of tokens in ggml.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Kinds of tokenizers, by `tokenizer.ggml.model`.
SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"
# Ids that llama.cpp takes where a file names none.
DEFAULT_IDS = {SENTENCEPIECE: {"bos": 1, "eos": 2, "unknown": 0}}

# Texts by which llama.cpp (`llama-vocab.cpp`, October 2026) knows tokens that end an answer, whatever their types.
END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[e~[",
)
# Texts of tokens for filling in the middle. The first three kinds end an answer, where the file names no id.
FILL_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<\uff5cfim\u2581begin\uff5c>",
        "<PRE>",
        "\u2581<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<SUF>",
        "\u2581<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<\uff5cfim\u2581end\uff5c>",
        "<MID>",
        "\u2581<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
}
# Older names of three of these ids.
OLDER_IDS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
# Tokens that a file may name, by `tokenizer.ggml.NAME_token_id`.
NAMED_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", *FILL_TEXTS, *OLDER_IDS.values())
# Parts of an answer in gpt-oss's format, which are text.
SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
# Where there is one of the first and one of the second, this ends a part of an answer only.
CALLS, RETURNS, PART_END = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}, "<|end|>"
# With one of these, this is an ordinary token.
ORDINARY_S, TEXT_END = {"<|tool_response>", "<|plamo:eos|>"}, "</s>"


@dataclass(frozen=True)
class GgufVocabulary:
    """Tokens of a GGUF file.

    Attributes:
        kind: `tokenizer.ggml.model`.
        tokens: their texts; of byte-level ones in GPT-2's alphabet of bytes.
        values: the file's keys.
    """

    kind: str
    tokens: list[str]
    values: Mapping[str, Any]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "GgufVocabulary":
        """Read the vocabulary from a file's keys; without tokens it is empty.

        Raises:
            CheckpointError: tokens that are no texts.
        """
        kind, tokens = str(values.get(f"{PREFIX}model")), values.get(f"{PREFIX}tokens", [])
        if not isinstance(tokens, list):
            raise CheckpointError(f"{PREFIX}tokens are no texts")
        if "" in tokens:
            tokens = [text or f"[EMPTY_{token}]" for token, text in enumerate(tokens)]
        return cls(kind, tokens, values)

    def check(self) -> None:
        """Check that a tokenizer can be built of it; a model can run with another tokenizer.

        Raises:
            CheckpointError: two tokens of the same text, or fewer types than tokens.
        """
        if len(self.ids) != len(self.tokens):
            twice = next(token for token, text in enumerate(self.tokens) if self.ids[text] != token)
            text = self.tokens[twice]
            raise CheckpointError(f"tokens {twice} and {self.ids[text]} are both {text!r}")
        types = self.values.get(f"{PREFIX}token_type")
        if types is not None and len(types) < len(self.tokens):
            raise CheckpointError(f"{PREFIX}token_type has {len(types)} entries for {len(self.tokens)} tokens")

    @cached_property
    def ids(self) -> dict[str, int]:
        """The token of each text."""
        return dict(zip(self.tokens, range(len(self.tokens)), strict=True))

    @cached_property
    def ids_without_padding(self) -> dict[str, int]:
        """The token of each text that the model's own tokenizer has.

        llama.cpp's converter names rows of the output matrix beyond the tokenizer's last token `[PAD123]`.
        """
        types = self.values.get(f"{PREFIX}token_type")
        if types is None:
            return self.ids
        unused = {*np.flatnonzero(np.asarray(types) == UNUSED).tolist()}
        return {text: token for text, token in self.ids.items() if token not in unused or text != f"[PAD{token}]"}

    def id(self, name: str) -> int | None:
        """Return a special token: that of the file, or else llama.cpp's for this kind; None for none.

        Raises:
            CheckpointError: a value that is no number of a token.
        """
        found = self.values.get(f"{PREFIX}{name}_token_id")
        if found is None and name in OLDER_IDS:
            found = self.values.get(f"{PREFIX}{OLDER_IDS[name]}_token_id")
        if found is not None and type(found) is not int:
            raise CheckpointError(f"{PREFIX}{name}_token_id is {found!r}; it must be a token")
        if found is None or not 0 <= found < len(self.tokens):
            found = DEFAULT_IDS.get(self.kind, {}).get(name)
        return None if found is None or found >= len(self.tokens) else found

    @cached_property
    def named_ends(self) -> frozenset[int]:
        """Tokens that the file says end a text or a turn."""
        ends = (self.id(name) for name in ("eos", "eot", "eom"))
        return frozenset(end for end in ends if end is not None)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        found = {*self._known(END_TEXTS), *self.named_ends, *self._fills("fim_pad", "fim_rep", "fim_sep")}
        return frozenset(token for token in found if self.tokens[token] not in self._no_ends(found))

    def _no_ends(self, ends: set[int]) -> set[str]:
        """Return texts of ends that end less than an answer beside these others."""
        texts = {self.tokens[token] for token in ends}
        found = set()
        if texts & CALLS and texts & RETURNS:
            found.add(PART_END)
        if texts & ORDINARY_S:
            found.add(TEXT_END)
        return found

    @cached_property
    def special(self) -> dict[int, bool]:
        """Tokens that are found in a text before it is split, and whether they stand for no text."""
        types = self.values.get(f"{PREFIX}token_type")
        found = {}
        if types is not None:
            for token in np.flatnonzero(np.isin(types[: len(self.tokens)], (CONTROL, USER_DEFINED, UNKNOWN))).tolist():
                found[token] = bool(types[token] != USER_DEFINED)
        fills = self._fills(*(name for name in FILL_TEXTS if self.id(name) is None))
        ends = {*self._known(END_TEXTS)}
        found |= dict.fromkeys((*ends, *fills), True) | dict.fromkeys(self._known(SHOWN), False)
        for text in self._no_ends(ends):
            token = self.ids[text]
            if text == PART_END:
                found[token] = False
            else:
                found.pop(token, None)
        return found

    def _known(self, texts: tuple[str, ...]) -> Iterator[int]:
        return (self.ids[text] for text in texts if text in self.ids)

    def _fills(self, *names: str) -> Iterator[int]:
        """Return tokens for filling in the middle: those that the file names, or else the first of a known text."""
        for name in names:
            named = self.id(name)
            token = named if named is not None else next(self._known(FILL_TEXTS[name]), None)
            if token is not None:
                yield token
