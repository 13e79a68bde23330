"""Checkpoints with a tokenizer of Llama 2's kind: `▁` for spaces, the first one dropped, single bytes for the rest."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.fakes import save_random_llama

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
CALL = '{"name":▁"f",▁"arguments":▁{"a":▁1}}'
WORDS = [CALL, "▁hello", "▁world", "▁true", "true", "▁cat", "cat", "▁", "▁▁", "▁the", "s", ",", "x", "▁x", "<0x41"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{% if not (loop.last and m.role == 'assistant') %} </s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


def metaspace_tokenizer() -> Tokenizer:
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = [(piece, -10.0 if piece.startswith("<") else -1.0) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocab, 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


TOKENIZER = metaspace_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
# Tokens of words, which are text wherever they stand.
WORD_IDS = [TOKENIZER.token_to_id(word) for word in WORDS]


def ids(*pieces: str) -> list[int]:
    """Return the ids of pieces of the vocabulary."""
    found = [TOKENIZER.token_to_id(piece) for piece in pieces]
    assert None not in found
    return found


def byte_ids(text: str) -> list[int]:
    """Return the tokens of a text's bytes."""
    return ids(*(f"<0x{byte:02X}>" for byte in text.encode()))


def save_chain(folder: Path, chain: Sequence[int], eos: str = "</s>", **config: Any) -> None:
    """Write a checkpoint whose likeliest token after each of a chain is the next of it."""
    model = save_metaspace(folder, eos, hidden_size=128, **config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token, following in itertools.pairwise(chain):
            model.lm_head.weight[following] += model.model.embed_tokens.weight[token] * 100
    model.save_pretrained(folder)


def save_metaspace(folder: Path, eos: str = "</s>", **config: Any) -> LlamaForCausalLM:
    """Write a checkpoint; `eos` is the tokenizer's end token."""
    model = save_random_llama(folder, vocab_size=VOCAB, **config)
    PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER, bos_token="<s>", eos_token=eos, unk_token="<unk>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return model
