"""Checkpoints whose tokenizer spells any text: all bytes, and some longer tokens; and engines of them."""

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdec import LLM, DraftShape
from tests.fakes import save_random_eagle3, save_random_head, save_random_llama

SPECIAL = ["<unk>", "<s>", "</s>"]
EOS = 2
MERGES = [('"', ":"), ('":', "Ġ"), (",", "Ġ"), ("{", '"'), ("n", "a"), ("m", "e"), ("na", "me"), ("e", "s"), ("t", "r")]
# Text, as Qwen3 has them, where a tokenizer has them at all.
MARKS = ["<think>", "</think>", "<tool_call>"]
# Columns of the logits, of which the last ones are no tokens.
VOCAB = 288


# By night all of them under every rule. The rules other than the default one take longer.
SHAPE = DraftShape(4, 2, 6)


class Bytes(NamedTuple):
    """Checkpoint folders, and the target as transformers has it.

    Attributes:
        head: EAGLE's.
        head3: EAGLE-3's, which proposes some of the tokens only.
    """

    target: Path
    head: Path
    head3: Path
    model: LlamaForCausalLM


def save_bytes(root: Path) -> Bytes:
    """Write the checkpoints into folders under `root`."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 1024, "head_dim": 16}
    model = save_random_llama(root / "target", **sizes)
    save_random_head(root / "head", **sizes)
    save_random_eagle3(root / "head3", draft_vocab_size=200, **sizes)
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(root / "target")
    assert len(pieces) < VOCAB
    return Bytes(root / "target", root / "head", root / "head3", model)


def save_thinking(root: Path, folders: Bytes) -> Bytes:
    """Write the same target into a folder, with a tokenizer that has the marks of thinking and of calls besides."""
    root.mkdir()
    for file in folders.target.iterdir():
        if not file.name.startswith("tokenizer"):
            (root / file.name).symlink_to(file)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders.target)
    tokenizer.add_tokens(MARKS)
    tokenizer.save_pretrained(root)
    return folders._replace(target=root)


def load(folders: Bytes, draft: Path | str | None, verify: str = "coupled", **options: Any) -> LLM:
    given: dict[str, Any] = {
        "shape": SHAPE,
        "verify": verify,
        "adaptive_drafts": False,
        "prefill_stretch": 0,
        **options,
    }
    return LLM(folders.target, draft, dtype="float64", kv_cache_memory=96 << 20, **given)
