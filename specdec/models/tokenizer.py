"""Tokenizers of checkpoint folders: text to tokens and back, and the chat template."""

import hashlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec.core.chat_content import template_messages
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, read_object
from specdec.gguf.file import GgufFile, is_gguf
from specdec.gguf.tokenizer import load_gguf_tokenizer
from specdec.kernels.types.settings import one_line
from specdec.models.checkpoint import check_tokenizer, has_tokenizer
from specdec.models.content_formats import ContentFormats
from specdec.models.grammar_tokens import GrammarTokens
from specdec.models.token_length import longest_token
from specdec.text.text_stream import REPLACEMENT, TextStream, WholeTokens
from specdec.text.token_texts import TokenTexts

# Templates whose content formats are remembered.
_MOST_TEMPLATES = 32
# Characters of texts that are tokenized by one call, which takes a hundred times as many bytes.
_MOST_AT_ONCE = 1 << 18


def load_pretrained(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder or a GGUF file. Code in the folder is never run.

    Raises:
        CheckpointError: no such folder, or the tokenizer cannot be read.
    """
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder; give a checkpoint with a tokenizer")
    if is_gguf(folder):
        return load_gguf_tokenizer(folder)
    try:
        tokenizer: PreTrainedTokenizerBase = _loader(folder).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizers raises a bare Exception, transformers many kinds
        check_tokenizer(folder)
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: {one_line(error)}") from None
    _name_ends(tokenizer, folder / "config.json")
    return tokenizer


def _name_ends(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Name the tokens of a text's ends, where the tokenizer's files say nothing of them, by the ids of config.json."""
    config = read_object(file) if file.is_file() else {}
    for name in ("bos_token", "eos_token"):
        token = config.get(f"{name}_id")
        if name not in tokenizer.init_kwargs and getattr(tokenizer, name) is None and type(token) is int:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token))


def _loader(folder: Path) -> Any:
    """Return the class that reads the tokenizer: the one that takes tokenizer.json as it is.

    Classes of single models build parts of their own in place of the file's, and transformers chooses among them by
    config.json too.
    """
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


class Tokenizer:
    """The tokenizer of a checkpoint folder or a GGUF file."""

    def __init__(self, folder: Path) -> None:
        check_tokenizer(folder)
        self._hf = load_pretrained(folder)
        self.backend: FastTokenizer = self._hf.backend_tokenizer
        self._formats: dict[str, ContentFormats] = {}
        # From the start: a first call that turned them off could not run beside another thread's.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = bool(self._hf.split_special_tokens)

    @cached_property
    def pretrained(self) -> PreTrainedTokenizerBase:
        """A copy of the tokenizer as transformers has it; calls of it may change its truncation and padding."""
        return deepcopy(self._hf)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Texts of single tokens."""
        return TokenTexts(self.backend)

    @cached_property
    def whole_tokens(self) -> WholeTokens:
        """Texts of tokens that bring the same text wherever they stand."""
        return WholeTokens(self.backend)

    @cached_property
    def longest_token(self) -> int | None:
        """Characters of a text that one token stands for at most; None if there is no such number."""
        return longest_token(self.backend)

    @property
    def has_chat_template(self) -> bool:
        return self._hf.chat_template is not None

    @property
    def special_tokens(self) -> frozenset[int]:
        """Tokens that stand for no text, such as the ends of turns."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token for token, content in added.items() if content.special)

    @property
    def end_token(self) -> int | None:
        """The token that ends a text; None if the tokenizer names none that it has."""
        name = self._hf.eos_token
        return None if name is None else self.backend.token_to_id(str(name))

    def special_named(self, texts: Container[str]) -> dict[str, int]:
        """Return the special tokens of these texts, by their texts."""
        added = self.backend.get_added_tokens_decoder()
        return {one.content: token for token, one in added.items() if one.special and one.content in texts}

    @property
    def chat_template(self) -> str:
        """The chat template; several named ones joined; empty if there is none."""
        template = self._hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    def set_chat_template(self, template: str) -> None:
        """Take another chat template, for all conversations from here on."""
        self._hf.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the text's tokens, with the special tokens that the tokenizer adds to a text.

        Other threads run meanwhile.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the tokens of several texts, each as `encode` does."""
        found: list[list[int]] = []
        for part in _parts(texts):
            # Of the backend's calls, those for several texts let other threads run; the fast one records no places.
            encodings = self.backend.encode_batch_fast(part, add_special_tokens=add_special_tokens)
            found += [list(one.ids) for one in encodings]
        return found

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences that spell each word, at the beginning of a text and after a space, as in vLLM."""
        texts = [space + word.lstrip() for word in words for space in ("", " ")]
        tokens = iter(map(tuple, self.encode_batch(texts, add_special_tokens=False)))
        found: list[tuple[int, ...]] = []
        for plain, spaced in zip(tokens, tokens, strict=True):
            # A word of characters that the tokenizer drops cannot come.
            if plain:
                found.append(plain)
            if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        return tuple(found)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> list[int]:
        """Return the tokens of a conversation; see `chat_text`."""
        return self.encode(self.chat_text(messages, **template_arguments), add_special_tokens=False)

    def chat_messages(self, messages: Sequence[Any], **template_arguments: Any) -> list[dict[str, Any]]:
        """Convert messages from the forms that clients send to the form that the chat template reads.

        Args:
            template_arguments: as in `chat_text`.

        Raises:
            ValueError: a message that is none, or holds more than text.
        """
        template = self._template_of(template_arguments)
        if len(self._formats) >= _MOST_TEMPLATES and template not in self._formats:
            self._formats.clear()
        formats = self._formats.setdefault(template, ContentFormats())
        arguments = {**template_arguments, "add_generation_prompt": False, "continue_final_message": False}

        def render(given: list[dict[str, Any]]) -> str:
            return self.chat_text(given, **arguments)

        format_of = cache(lambda role: formats.of(role, render))
        return template_messages(
            messages,
            format_of,
            lambda: formats.joins_arguments(render),
            knows_developers="developer" in template,
            has_short_ids="alphanumeric strings with length 9" in template,
        )

    def reads_tools(self, **template_arguments: Any) -> bool:
        """Return whether the chat template of these arguments shows tools to the model."""
        return "tools" in self._template_of(template_arguments)

    def _template_of(self, template_arguments: Mapping[str, Any]) -> str:
        given, tools = (template_arguments.get(name) for name in ("chat_template", "tools"))
        try:
            return str(self._hf.get_chat_template(given, tools))
        except ValueError as error:
            raise ValueError(f"the chat template cannot be chosen: {one_line(error)}") from None

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> str:
        """Return the text of a conversation with its special tokens, up to where the assistant's answer begins.

        Args:
            template_arguments: arguments of transformers' `apply_chat_template`, such as `tools`, and variables of the
                template.

        Raises:
            ValueError: the chat template refuses the messages or the arguments.
        """
        arguments = {"add_generation_prompt": True, **template_arguments, "tokenize": False}
        try:
            return str(self._hf.apply_chat_template([dict(m) for m in messages], **arguments))
        # Templates are code: they add text to what may be none, index what may be short, and descend into schemas.
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise ValueError(f"the chat template refuses the conversation: {one_line(error)}") from None

    def grammar_tokens(self, vocab_size: int, end_tokens: frozenset[int]) -> GrammarTokens:
        """Return the text of every token, as grammars need it.

        Args:
            vocab_size: columns of the model's logits.
            end_tokens: tokens that end an output.
        """
        special, known = self.special_tokens, self.token_texts
        texts = [b""] * max(vocab_size, len(self._hf))
        for token in self._hf.get_vocab().values():
            text = known.text(token)
            texts[token] = (REPLACEMENT in text and known.part_bytes(token)) or text.encode()
        return GrammarTokens(texts, sorted(special), sorted(end_tokens))

    def text_before(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens without the incomplete character that they may end with."""
        text = str(self.backend.decode(list(token_ids), skip_special_tokens=True))
        if not text.endswith(REPLACEMENT):
            return text
        stream = TextStream(self.backend)
        return "".join([*map(stream.step, token_ids), stream.end()])

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._hf.decode(list(token_ids), skip_special_tokens=True))


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in lists that have few characters, or one text, each."""
    part, size = list[str](), 0
    for text in texts:
        if part and size + len(text) > _MOST_AT_ONCE:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def check_same_vocabulary(folder: Path, target: Path) -> None:
    """Check that a draft model has the target's tokens, if both have a tokenizer.

    Raises:
        CheckpointError: a token differs; names the first.
    """
    if not (has_tokenizer(folder) and has_tokenizer(target)):
        return
    own, wanted = ({i: token for token, i in _vocabulary(where).items()} for where in (folder, target))
    for token in sorted(own.keys() | wanted.keys()):
        if own.get(token) != wanted.get(token):
            raise CheckpointError(
                f"{folder}: its tokenizer is not the target's: token {token} is {own.get(token)!r}, "
                f"the target's is {wanted.get(token)!r}; take a draft model with the target's tokenizer"
            )


def vocabulary_digest(folder: Path) -> str | None:
    """Return a short hash of a checkpoint's tokens and their ids, None if it has no tokenizer.

    Data and heads record it, so that they are not joined with a target that has other tokens.
    """
    if not has_tokenizer(folder):
        return None
    return hashlib.sha256(json.dumps(sorted(_vocabulary(folder).items())).encode()).hexdigest()[:12]


def _vocabulary(folder: Path) -> dict[str, int]:
    if is_gguf(folder):
        return GgufFile.open(folder).vocabulary.ids_without_padding
    file = folder / "tokenizer.json"
    try:
        found: dict[str, int] = FastTokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # tokenizers raises a bare Exception
        raise CheckpointError(f"{file}: cannot be read: {one_line(error)}") from None
    return found
