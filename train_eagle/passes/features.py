"""Training data of a head: conversations with the target's states of each token, computed anew or stored on disk."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.draft_heads.heads.draft_head import HeadForm, TargetOutput
from specdec.draft_heads.llama.llama_layer import Attention, PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.kernels.kernel_set import torch_kernels
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.models.llama import LlamaModel
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.data.prepared_data import write_json, write_whole
from specdec.train_eagle.passes.unrolled_attention import UnrolledAttention
from specdec.verify.noise import GumbelNoise

PARTS = ("tokens", "mask", "features", "taps")


@dataclass(frozen=True)
class FeatureBatch:
    """A batch of conversations, concatenated.

    Attributes:
        lengths: number of tokens of each conversation.
        tokens: int64 `[tokens]`.
        mask: bool `[tokens]`, whether the assistant said the token.
        features: `[tokens, hidden_size]`, the target's hidden states after its final norm.
        taps: `[tokens, taps * hidden_size]`, the inputs of the target layers that the head reads, concatenated.
    """

    lengths: Sequence[int]
    tokens: Tensor
    mask: Tensor
    features: Tensor
    taps: Tensor

    def to(self, device: torch.device) -> "FeatureBatch":
        parts = (getattr(self, name).to(device, non_blocking=True) for name in PARTS)
        return FeatureBatch(self.lengths, *parts)

    def read_by(self, head: HeadForm) -> Tensor:
        """Return what a head reads of every token, `[tokens, feature_size]`, in the head's dtype."""
        taps = [tap.to(head.dtype) for tap in self.taps.chunk(len(head.taps), -1)] if head.taps else []
        return head.feature_of(TargetOutput(self.features.to(head.dtype), taps))


class OnlineFeatures:
    """Conversations by number, with features that the target computes for every batch.

    Args:
        tap_layers: target layers whose inputs are wanted (k is transformers' `hidden_states[k]`).

    Attributes:
        lengths: number of tokens of each conversation.
    """

    def __init__(self, model: LlamaModel, samples: Sequence[Sample], tap_layers: Sequence[int]) -> None:
        config, weight = model.config, model.embed_tokens.weight
        self.kernels = torch_kernels(GumbelNoise(weight.device))
        self.model, self.samples, self.tap_layers = model, samples, tuple(tap_layers)
        self.lengths = [len(sample.token_ids) for sample in samples]
        self.device = weight.device
        self.rope = config.rope.table(config.head_dim, config.max_position, weight.dtype).to(self.device)

    @torch.no_grad()
    def batch(self, conversations: Sequence[int]) -> FeatureBatch:
        """Return some conversations, in the order given."""
        samples = [self.samples[i] for i in conversations]
        lengths = [self.lengths[i] for i in conversations]
        tokens = torch.tensor([token for sample in samples for token in sample.token_ids], device=self.device)
        mask = torch.tensor([said for sample in samples for said in sample.mask], device=self.device)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        attentions = self._attentions(lengths, positions)
        output: TargetOutput = self.model(tokens, rotary_at(self.rope, positions), attentions, self.tap_layers)
        features = output.features
        taps = torch.cat(output.taps, -1) if output.taps else features.new_empty(len(features), 0)
        return FeatureBatch(lengths, tokens, mask, features, taps)

    def _attentions(self, lengths: Sequence[int], positions: Tensor) -> list[Attention]:
        """Return the layers' attentions: those with a window or ALiBi as in serving, the others by fused kernels."""
        config, tokens = self.model.config, len(positions)
        slopes = config.slopes(self.rope.dtype, self.device)
        slots, starts = torch.arange(tokens, device=self.device), list(accumulate(lengths, initial=0))[:-1]
        # A cache of this batch alone, in blocks of one token.
        tables = torch.tensor(starts, device=self.device)[:, None] + torch.arange(max(lengths), device=self.device)
        rows = RaggedRows(
            query_lens=lengths,
            lengths=lengths,
            tree_starts=lengths,
            block_tables=tables,
            visible=positions + 1,
            ancestors=positions.new_zeros(tokens, 1),
            block_size=1,
        )

        def attention(window: int) -> Attention:
            if not window and slopes is None:
                return UnrolledAttention(lengths)
            kv = self.rope.new_empty(tokens, 2 * config.num_kv_heads, config.head_dim)
            return PagedAttention(kv, slots, rows, self.kernels, window, slopes=slopes)

        return [attention(window) for window in config.layer_windows]


class FeatureStore:
    """Features in a folder of safetensors shards, with `index.json` for the lengths of their conversations.

    Read like `OnlineFeatures`.

    A shard is written whole before the index names it, so that an interrupted run goes on with conversation number
    `len(store.lengths)`.

    Raises:
        ValueError: the folder was written with other `settings`.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self._index = folder / "index.json"
        # Per conversation its shard, and the number of the first token there.
        self._places: list[tuple[Any, int]] = []
        self.lengths: list[int] = []
        self._entries: dict[str, Any] = {"settings": settings, "shards": []}
        if self._index.exists():
            kept = json.loads(self._index.read_text(encoding="utf-8"))
            old, wanted = kept.get("settings") or {}, json.loads(json.dumps(settings))
            if other := [name for name in (*wanted, *old) if old.get(name) != wanted.get(name)]:
                told = f"{other[0]}: {old.get(other[0])}, not {wanted.get(other[0])}"
                raise ValueError(
                    f"{folder} holds features of other settings, made with another {told}; remove it or name another "
                    "folder"
                )
            self._entries = kept
            for entry in kept["shards"]:
                self._open(entry)

    def write(self, source: OnlineFeatures, shard_tokens: int, batch_tokens: int) -> Iterator[int]:
        """Add the missing conversations of `source`; yield the number of stored ones after each shard."""
        left = range(len(self.lengths), len(source.lengths))
        for shard in _runs(source.lengths, left, shard_tokens):
            self._add([source.batch(group) for group in _runs(source.lengths, shard, batch_tokens)])
            yield len(self.lengths)

    def batch(self, conversations: Sequence[int]) -> FeatureBatch:
        parts: dict[str, list[Tensor]] = {name: [] for name in PARTS}
        for i in conversations:
            shard, start = self._places[i]
            for name in PARTS:
                parts[name].append(shard.get_slice(name)[start : start + self.lengths[i]])
        tokens, *others = (torch.cat(parts[name]) for name in PARTS)
        return FeatureBatch([self.lengths[i] for i in conversations], tokens.long(), *others)

    def _add(self, batches: Sequence[FeatureBatch]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lengths = [length for batch in batches for length in batch.lengths]
        tensors = {name: torch.cat([getattr(batch, name) for batch in batches]).cpu() for name in PARTS}
        tensors["tokens"] = tensors["tokens"].int()
        entry: dict[str, Any] = {"file": f"features-{len(self._entries['shards']):05d}.safetensors", "lengths": lengths}
        write_whole(self.folder / entry["file"], lambda new: save_file(tensors, new))
        self._entries["shards"].append(entry)
        write_json(self._index, self._entries)
        self._open(entry)

    def _open(self, entry: dict[str, Any]) -> None:
        shard = safe_open(self.folder / entry["file"], framework="pt")
        starts = accumulate(entry["lengths"][:-1], initial=0)
        self._places += [(shard, start) for start in starts]
        self.lengths += entry["lengths"]


def _runs(lengths: Sequence[int], conversations: Iterable[int], most: int) -> Iterator[list[int]]:
    """Yield conversations in their order, in groups of at most `most` tokens; a longer one is a group of its own."""
    group: list[int] = []
    size = 0
    for i in conversations:
        if group and size + lengths[i] > most:
            yield group
            group, size = [], 0
        group.append(i)
        size += lengths[i]
    if group:
        yield group


def packed(lengths: Sequence[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """Return the batches of one epoch: every conversation once, in an order that follows from the seed.

    A conversation goes into the first open batch that has room for it, so that batches are nearly full.

    Args:
        lengths: number of tokens of each conversation.
        batch_tokens: most tokens of a batch.

    Raises:
        ValueError: a conversation is longer than a batch.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    full: list[list[int]] = []
    # Only few batches are open at a time, or the last ones would hold only short conversations.
    open_: list[tuple[int, list[int]]] = []
    for i in order:
        length = lengths[i]
        if length > batch_tokens:
            raise ValueError(f"a conversation has {length} tokens, more than batch_tokens = {batch_tokens}")
        for place, (room, batch) in enumerate(open_):
            if length <= room:
                batch.append(i)
                open_[place] = (room - length, batch)
                break
        else:
            open_.append((batch_tokens - length, [i]))
            if len(open_) > 4:
                open_.sort(key=lambda entry: entry[0])
                full.append(open_.pop(0)[1])
    return full + [batch for _, batch in open_]
