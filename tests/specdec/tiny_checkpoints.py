"""Checkpoints small enough to generate from in a test, with tokenizer, chat template and heads."""

import string
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.fakes import save_random_head, save_random_llama

CHARACTERS = string.printable[:-3]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class Tiny(NamedTuple):
    """Checkpoint folders.

    Attributes:
        target: a model with a tokenizer of single characters.
        head: a head that fits `target`.
        wide_head: a head that does not fit it.
        bare: a model without tokenizer.
    """

    target: Path
    head: Path
    wide_head: Path
    bare: Path


def save_tiny(root: Path) -> Tiny:
    """Write the checkpoints into folders under `root`."""
    folders = Tiny(*(root / name for name in Tiny._fields))
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *CHARACTERS])}
    save_random_llama(folders.target, vocab_size=len(vocab))
    save_random_llama(folders.bare, vocab_size=len(vocab))
    save_random_head(folders.head, vocab_size=len(vocab))
    save_random_head(folders.wide_head, vocab_size=len(vocab), hidden_size=64)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    ).save_pretrained(folders.target)
    return folders
