"""The store of texts that drafts come from, with the corpus of the start."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdec.config import EngineConfig
from specdec.draft_heads.drafting.stored_chains import DraftStore
from specdec.kernels.native.library import library_file
from specdec.kernels.native.text_store import NativeTextStore
from specdec.kernels.reference.text_store import PythonTextStore
from specdec.kernels.types.text_store import BYTES_PER_TOKEN, TextStore
from specdec.models.tokenizer import Tokenizer
from specdec.parallel.ranks import Ranks

# Characters that are made tokens at a time, as a text of its own.
_PIECE = 1 << 16

logger = logging.getLogger(__name__)


def check_corpus(files: Sequence[str], *, is_used: bool) -> None:
    """Check the files of a corpus before anything is loaded.

    Args:
        is_used: whether drafts come from earlier texts.

    Raises:
        ValueError: a file that is no UTF-8 text, or a corpus that is not used.
    """
    if files and not is_used:
        raise ValueError(f"draft_corpus is {files[0]!r}; it is for draft 'suffix'; leave it out, or draft with suffix")
    for file in files:
        for _ in _pieces(file):
            pass


def draft_store(config: EngineConfig, ranks: Ranks, tokenizer: Tokenizer | None) -> DraftStore:
    """Return the store of an engine with the corpus, which the first rank reads for all.

    Raises:
        ValueError: a corpus that cannot be read, or a model without a tokenizer.
    """
    store = DraftStore(_texts(config.draft_store_tokens), config.shape.branching)
    corpus = ranks.decide(lambda: _tokens(config.draft_corpus, tokenizer))
    for tokens in corpus:
        store.add_corpus(tokens)
    size, most = sum(map(len, corpus)), config.draft_store_tokens
    logger.info("draft store: %d tokens, %.1f MiB, %d of the corpus", most, most * BYTES_PER_TOKEN / (1 << 20), size)
    if size > most:
        logger.warning("draft_corpus has %d tokens, draft_store_tokens is %d: its beginning is not kept", size, most)
    return store


def _texts(tokens: int) -> TextStore:
    """Return an empty store for `tokens` tokens, by the compiled library where it is built."""
    return PythonTextStore(tokens) if library_file() is None else NativeTextStore(tokens)


def _tokens(files: Sequence[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the tokens of the texts of files."""
    if files and tokenizer is None:
        raise ValueError("draft_corpus needs a tokenizer, and the model's folder has none; leave it out")
    found: list[list[int]] = []
    for file in files:
        tokens: list[int] = []
        for piece in _pieces(file):
            assert tokenizer is not None
            tokens += tokenizer.encode(piece, add_special_tokens=False)
        found.append(tokens)
    return found


def _pieces(file: str) -> Iterator[str]:
    """Yield the text of a file, in pieces that end with a line where there are lines."""
    try:
        with Path(file).open(encoding="utf-8", newline="") as lines:
            while piece := lines.read(_PIECE):
                yield piece + lines.readline(_PIECE)
    except OSError as error:
        raise ValueError(f"draft_corpus has {file!r}, which cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"draft_corpus has {file!r}, which is no UTF-8 text; give text files") from None
