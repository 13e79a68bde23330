"""Training data of a head: conversations with the target's states of each token, computed anew or stored on disk."""

import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.draft_heads.heads.draft_head import HeadForm, TargetOutput
from specdec.draft_heads.llama.llama_layer import Attention, PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.draft_heads.llama.whole_files import write_whole
from specdec.kernels.kernel_set import torch_kernels
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.models.llama import LlamaModel
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.passes.unrolled_attention import UnrolledAttention

PARTS = ("tokens", "mask", "features", "taps")
# Most tokens of a shard, whose features wait in memory.
SHARD_TOKENS = 1 << 18
# Seconds after which an unfinished shard is that of a killed process.
ABANDONED = 3600


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
        self.kernels = torch_kernels(weight.device)
        self.model, self.samples, self.tap_layers = model, samples, tuple(tap_layers)
        self.lengths = [len(sample.token_ids) for sample in samples]
        self.device, self.dtype = weight.device, weight.dtype
        self.rope = config.rope.table(config.head_dim, config.max_position, weight.dtype).to(self.device)

    @torch.no_grad()
    def batch(self, conversations: Sequence[int]) -> FeatureBatch:
        """Return some conversations, in the order given."""
        samples = [self.samples[i] for i in conversations]
        lengths = [self.lengths[i] for i in conversations]
        tokens = torch.tensor([token for sample in samples for token in sample.token_ids], device=self.device)
        mask = torch.tensor([said for sample in samples for said in sample.mask], dtype=torch.bool, device=self.device)
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
    """Features of conversations that are computed when they are first wanted, and kept in a folder.

    Read like `OnlineFeatures`. Each shard of the folder is a safetensors file that also names its conversations. It is
    written whole under a name of its own, so a killed run leaves what another one reads, and several processes may
    write to a folder; each reads the shards that were there when it began, and its own.

    float32 features are rounded to bfloat16, also where they are used at once: half as much to keep, and the precision
    in which a device with bfloat16 arithmetic computes them.

    Args:
        settings: what the features depend on.
        source: computes them.

    Raises:
        ValueError: the folder was written with other `settings`.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], source: OnlineFeatures) -> None:
        self.folder, self.source, self.lengths = folder, source, source.lengths
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        # Per conversation on disk its shard, and the number of the first token there; of others what is kept of them.
        self._places: dict[int, tuple[Any, int]] = {}
        self._new: dict[int, dict[str, Tensor]] = {}
        for file in folder.glob("features-*.tmp"):
            # Another process may finish it meanwhile.
            with suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > ABANDONED:
                    file.unlink()
        for file in sorted(folder.glob("features-*.safetensors")):
            self._open(file)

    @property
    def tokens_left(self) -> int:
        """Tokens whose features are still to be computed."""
        return sum(length for i, length in enumerate(self.lengths) if i not in self._places and i not in self._new)

    def batch(self, conversations: Sequence[int]) -> FeatureBatch:
        """Return some conversations, in the order given."""
        missing = [i for i in conversations if i not in self._places and i not in self._new]
        if missing:
            self._keep(missing, self.source.batch(missing))
            if sum(self.lengths[i] for i in self._new) >= SHARD_TOKENS:
                self.flush()
        found = [self._kept(i) for i in conversations]
        tokens, mask, *states = (torch.cat([one[name] for one in found]) for name in PARTS)
        wide = (each.to(self.source.dtype) for each in states)
        return FeatureBatch([self.lengths[i] for i in conversations], tokens.long(), mask, *wide)

    def flush(self) -> None:
        """Write what was computed since the last time."""
        if not self._new:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: torch.cat([one[name] for one in self._new.values()]) for name in PARTS}
        told = {"settings": json.dumps(self._settings), "conversations": json.dumps(list(self._new))}
        file = self.folder / f"features-{uuid4().hex}.safetensors"
        write_whole(file, lambda new: save_file(tensors, new, told))
        self._open(file)
        self._new = {}

    def _keep(self, conversations: Sequence[int], batch: FeatureBatch) -> None:
        narrow = torch.bfloat16 if self.source.dtype == torch.float32 else self.source.dtype
        states = (each.to(narrow).cpu() for each in (batch.features, batch.taps))
        parts = (batch.tokens.int().cpu(), batch.mask.cpu(), *states)
        split = (torch.split(part, list(batch.lengths)) for part in parts)
        for i, *of_one in zip(conversations, *split, strict=True):
            self._new[i] = dict(zip(PARTS, of_one, strict=True))

    def _kept(self, conversation: int) -> dict[str, Tensor]:
        if conversation in self._new:
            return self._new[conversation]
        shard, start = self._places[conversation]
        end = start + self.lengths[conversation]
        return {name: shard.get_slice(name)[start:end] for name in PARTS}

    def _open(self, file: Path) -> None:
        shard = safe_open(file, framework="pt")
        # Nothing in a folder of an earlier version.
        told: dict[str, str] = shard.metadata() or {}  # type: ignore[no-untyped-call]
        old, wanted = json.loads(told.get("settings", "{}")), self._settings
        if other := [name for name in (*wanted, *old) if old.get(name) != wanted.get(name)]:
            found = f"{other[0]}: {old.get(other[0])}, not {wanted.get(other[0])}"
            raise ValueError(
                f"{self.folder} holds features of other settings, made with another {found}; remove it or name another "
                "folder"
            )
        start = 0
        for i in json.loads(told["conversations"]):
            self._places[i] = shard, start
            start += self.lengths[i]


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
            raise ValueError(f"a conversation has {length} tokens, more than batch_tokens {batch_tokens}; raise it")
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
