"""A random Llama whose tokens are words, with a chat template: what training and evaluation need of a target."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.fakes import save_random_llama

WORDS = [f"w{i}" for i in range(80)]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + ' <end> ' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' <end> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def save_word_llama(folder: Path, **overrides: Any) -> None:
    """Write a checkpoint whose tokens from 5 on are w0, w1, …"""
    save_random_llama(folder, **{"initializer_range": 0.2, **overrides})
    names = ["<pad>", "<bos>", "<end>", "<user>", "<assistant>", *WORDS, "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
