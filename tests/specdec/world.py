"""A tiny model with a text of its own, what drafts for it, and the same model in other forms."""

import copy
import functools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec import LoRARequest
from specdec.kernels.types.kv_entries import KV_DTYPES
from tests.baichuan import Baichuan, save_baichuan
from tests.coded_cache import as_stored
from tests.fakes import (
    TINY,
    edit_json,
    save_random_block,
    save_random_eagle3,
    save_random_head,
    save_random_llama,
    save_shallow_llama,
)
from tests.lora_adapters import merged, request_for, save_adapter, save_draft_adapter
from tests.quantized_checkpoints import FORMATS, quantize_folder
from tests.roundings import rounds_either_way
from tests.specdec.saved_llama import edit_tensors

VOCAB = 97
EOS = 2
# Tokens that the target with a window sees.
WINDOW = 12


# Checkpoints whose weights are quantised, and one that has scales of keys and values.
SCALED = "kv scales"
STORED = (*FORMATS, SCALED)
# Number of the adapter with which the draft model is adapted; the target is as with the first.
WITH_DRAFT = 3
# Block heads of every kind.
BLOCKS = ("dflash", "dspark", "domino", "dflash2")
# What drafts, and its folder in a world.
DRAFTS = {
    "eagle": "head",
    "eagle3": "head3",
    **{kind: kind for kind in BLOCKS},
    "llama": "small",
    "random": "head",
    "knowing": "head",
    "none": None,
}


class World(NamedTuple):
    folder: Path
    target: LlamaForCausalLM | MistralForCausalLM | Baichuan
    tokenizer: Tokenizer
    sliding_target: MistralForCausalLM | None = None
    adapters: tuple[Path, ...] = ()
    alibi_target: Baichuan | None = None
    kv_scales: Tensor | None = None

    def __repr__(self) -> str:
        # Its models would be hundreds of lines of a failure.
        return f"World({str(self.folder)!r})"

    def draft(self, drafter: str) -> Path | None:
        """The folder of one of `DRAFTS`."""
        name = DRAFTS[drafter]
        return self.folder / name if name else None

    def with_cache(self, kv_cache_dtype: str) -> "World":
        """The same checkpoints, and the target as it is when it reads its keys and values from such a cache."""
        if kv_cache_dtype == "auto" and self.kv_scales is None:
            return self
        dtype = KV_DTYPES["int8" if kv_cache_dtype == "auto" else kv_cache_dtype]
        if isinstance(self.target, Baichuan):
            return self._replace(target=self.target.reading_codes(dtype))
        return self._replace(target=reading_codes(self.target, dtype, self.kv_scales if dtype == torch.int8 else None))

    @property
    def sliding(self) -> "World":
        """The same weights with a sliding window in every layer, and the same drafts."""
        assert self.sliding_target is not None
        return World(self.folder / "sliding", self.sliding_target, self.tokenizer, adapters=self.adapters)

    @property
    def alibi(self) -> "World":
        """A model whose attention has ALiBi, and the same drafts."""
        assert self.alibi_target is not None
        return World(self.folder / "alibi", self.alibi_target, self.tokenizer)

    def adapter(self, number: int, draft: Path | None = None) -> LoRARequest | None:
        """The request for one of the adapters; None for 0, and where the target has none.

        Args:
            draft: folder of the draft model, of which `WITH_DRAFT` has an adapter too.
        """
        if not (number and self.adapters):
            return None
        found = request_for(self._adapter(number), number)
        if draft is None or number != WITH_DRAFT:
            return found
        folder = self.folder / "lora" / f"draft-{draft.name}"
        if not folder.exists():
            save_draft_adapter(folder, draft)
        return replace(found, draft_lora_path=str(folder))

    def _adapter(self, number: int) -> Path:
        return self.adapters[number - 1 if number < WITH_DRAFT else 0]

    def adapted(self, number: int) -> "World":
        """The same with an adapter merged into the target, for what is expected; itself where a request has none."""
        if not (number and self.adapters):
            return self
        return self._replace(target=_merged(self.target, self._adapter(number)))

    def stored(self, name: str) -> "World":
        """A quantised checkpoint of the target, one of `STORED`, and the same drafts; its target is dequantised."""
        return make_scaled(self) if name == SCALED else make_stored(self, name)

    def other(self, drafter: str) -> Path:
        """The folder of a head of the same shape with other weights, of EAGLE and block heads."""
        return self.folder / f"other-{DRAFTS[drafter]}"

    def logits(self, tokens: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            return self.target(torch.tensor([list(tokens)])).logits[0, -1]

    def rounds_either_way(self, tokens: Sequence[int]) -> bool:
        """Return whether the order of a sum may decide how the target rounds."""
        return rounds_either_way(self.target, tokens)


def reading_codes(target: PreTrainedModel, dtype: torch.dtype, scales: Tensor | None = None) -> Any:
    """Return a target with the same weights whose attention reads keys and values in 8 bits.

    Args:
        scales: of a checkpoint, `[layers, 2 * kv_heads]`.
    """
    name = f"codes-{dtype}" + ("" if scales is None else "-scaled")

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> Any:
        given = (None, None) if scales is None else scales[module.layer_idx].chunk(2)
        stored = [
            as_stored(part.transpose(1, 2), dtype, own).transpose(1, 2)
            for part, own in zip((key, value), given, strict=True)
        ]
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *stored, *args, **keywords)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    other = copy.deepcopy(target)
    other.set_attn_implementation(name)
    return other


def make_world(folder: Path) -> World:
    """A model of 97 tokens: special ones, pairs of letters, and bytes that only together are characters."""
    target = save_random_llama(folder / "target")
    for seed, prefix in enumerate(("", "other-")):
        save_random_head(folder / f"{prefix}head", seed)
        save_random_eagle3(folder / f"{prefix}head3", seed)
        for kind in BLOCKS:
            save_random_block(folder / f"{prefix}{kind}", kind, seed)
    save_shallow_llama(folder / "small", target)
    letters = [*"abcdefgh", "Ġ"]
    pieces = [*letters, *(a + b for a in letters for b in letters), "Ã", "©", "â", "Ĥ"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder / "target")
    assert len(vocab) == VOCAB == TINY["vocab_size"]
    sliding, adapters = make_sliding(folder, target), make_adapters(folder / "lora", target)
    return World(folder, target, fast.backend_tokenizer, sliding, adapters, make_alibi(folder))


def make_adapters(folder: Path, target: LlamaForCausalLM) -> tuple[Path, ...]:
    """Write an adapter of every module with odd ranks, and one of some modules with another scale."""
    scales = {"alpha_pattern": {"down_proj": 3, r"layers\.1\.self_attn\.q_proj": 7}}
    few = ("q_proj", "v_proj", "gate_proj", "down_proj")
    return (
        save_adapter(folder / "first", target, 3, 1, ranks={"k_proj": 1, "o_proj": 17}, **scales),
        save_adapter(folder / "second", target, 8, 2, few, use_rslora=True, size=0.15),
    )


@functools.cache
def _merged(target: LlamaForCausalLM | MistralForCausalLM, folder: Path) -> LlamaForCausalLM | MistralForCausalLM:
    return merged(target, folder)


@cache
def make_scaled(world: World) -> World:
    """Write the target with scales of its keys and values in int8, beside links to its drafts."""
    own = world.folder / "stored-scaled"
    shutil.copytree(world.folder / "target", own / "target")
    scales = torch.tensor([[0.03, 0.05, 0.02, 0.04], [0.06, 0.02, 0.03, 0.05]])

    def add(tensors: dict[str, Tensor]) -> None:
        for layer, row in enumerate(scales):
            for name, part in zip(("k_scale", "v_scale"), row.chunk(2), strict=True):
                tensors[f"model.layers.{layer}.self_attn.{name}"] = part.clone()

    edit_tensors(own / "target", add)
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "attn_head", "dynamic": False}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    edit_json(own / "target" / "config.json", quantization_config=quantization)
    link_drafts(world.folder, own)
    return world._replace(folder=own, kv_scales=scales)


@cache
def make_stored(world: World, name: str) -> World:
    """Write the target in the format of a quantised model, beside links to its drafts."""
    own = world.folder / f"stored-{name}"
    weights = quantize_folder(world.folder / "target", own / "target", name)
    target = LlamaForCausalLM(world.target.config).to(torch.float64)
    target.load_state_dict(weights)
    link_drafts(world.folder, own)
    return World(own, target.eval(), world.tokenizer)


def link_drafts(folder: Path, own: Path) -> None:
    """Link to the drafts of a world in a folder of another."""
    for other in folder.iterdir():
        if other.name not in ("target", "sliding", "alibi") and not other.name.startswith("stored-"):
            (own / other.name).symlink_to(other)


def make_sliding(folder: Path, target: LlamaForCausalLM) -> MistralForCausalLM:
    """Write the target with a window, beside links to its drafts."""
    own = folder / "sliding"
    sliding = MistralForCausalLM(MistralConfig(**{**target.config.to_dict(), "sliding_window": WINDOW})).to(
        torch.float64
    )
    sliding.load_state_dict(target.state_dict())
    sliding.save_pretrained(own / "target")
    link_drafts(folder, own)
    copy_tokenizer(folder, own)
    return sliding.eval()


def make_alibi(folder: Path) -> Baichuan:
    """Write a model with ALiBi, beside links to the drafts of a world."""
    own = folder / "alibi"
    target = save_baichuan(own / "target")
    link_drafts(folder, own)
    copy_tokenizer(folder, own)
    return target


def copy_tokenizer(folder: Path, own: Path) -> None:
    """Copy the tokenizer of a world's target to another's."""
    for file in (folder / "target").glob("*token*"):
        shutil.copy(file, own / "target")
