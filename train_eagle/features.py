"""The target's features of a set of conversations, captured once and kept as safetensors shards."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.draft_heads.rope import rotary_at
from specdec.models.llama import LlamaModel
from specdec.train_eagle.causal_attention import CausalAttention
from specdec.train_eagle.conversations import Sample


@dataclass(frozen=True)
class FeatureSample:
    """One conversation, ready to train on.

    Attributes:
        tokens: int64 `[length]`.
        mask: bool `[length]`, what the assistant said.
        features: `[length, hidden_size]`, the target's hidden states after its final norm.
    """

    tokens: Tensor
    mask: Tensor
    features: Tensor


@dataclass(frozen=True)
class FeatureBatch:
    """Conversations padded at their ends to one length: `[batch, length, …]`; padding is never in the mask."""

    tokens: Tensor
    mask: Tensor
    features: Tensor


@torch.inference_mode()
def capture(model: LlamaModel, samples: Sequence[Sample], batch_tokens: int = 8192) -> Iterator[FeatureSample]:
    """Run the target over `samples`, alike lengths together, and yield them in their own order."""
    config = model.config
    table = config.rope.table(config.head_dim, config.max_position, model.embed_tokens.weight.dtype)
    captured: dict[int, Tensor] = {}
    for group in _groups([len(sample.token_ids) for sample in samples], batch_tokens):
        length = max(len(samples[i].token_ids) for i in group)
        padded = [samples[i].token_ids + [0] * (length - len(samples[i].token_ids)) for i in group]
        tokens = torch.tensor(padded)
        attention = CausalAttention(len(group), length)
        rotary = rotary_at(table, torch.arange(length).repeat(len(group)))
        features = model(tokens.flatten(), rotary, [attention] * config.num_layers).features
        for i, row in zip(group, features.view(len(group), length, -1), strict=True):
            captured[i] = row[: len(samples[i].token_ids)].clone()
    for i, sample in enumerate(samples):
        yield FeatureSample(torch.tensor(sample.token_ids), torch.tensor(sample.mask), captured.pop(i))


class FeatureStore:
    """A folder of shards: tokens, masks and features laid end to end, and the conversations' lengths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, samples: Sequence[FeatureSample]) -> None:
        """Write one shard."""
        self.folder.mkdir(parents=True, exist_ok=True)
        index = self._index()
        name = f"features-{len(index):05d}.safetensors"
        tensors = {
            "tokens": torch.cat([sample.tokens for sample in samples]).to(torch.int32),
            "mask": torch.cat([sample.mask for sample in samples]),
            "features": torch.cat([sample.features for sample in samples]),
            "lengths": torch.tensor([len(sample.tokens) for sample in samples]),
        }
        save_file(tensors, self.folder / name)
        index.append({"file": name, "conversations": len(samples)})
        (self.folder / "index.json").write_text(json.dumps(index), encoding="utf-8")

    def load(self) -> list[FeatureSample]:
        """All conversations, in the order they were added."""
        samples: list[FeatureSample] = []
        for entry in self._index():
            shard = load_file(self.folder / str(entry["file"]))
            lengths = shard["lengths"].tolist()
            parts = (torch.split(shard[name], lengths) for name in ("tokens", "mask", "features"))
            samples += [FeatureSample(t.long(), m, f) for t, m, f in zip(*parts, strict=True)]
        return samples

    def _index(self) -> list[dict[str, str | int]]:
        file = self.folder / "index.json"
        entries: list[dict[str, str | int]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        return entries


def batches(samples: Sequence[FeatureSample], batch_tokens: int, seed: int) -> list[FeatureBatch]:
    """One epoch: alike lengths together, batches in random order; a function of the seed."""
    groups = _groups([len(sample.tokens) for sample in samples], batch_tokens, random.Random(seed))
    return [_pad([samples[i] for i in group]) for group in groups]


def _pad(samples: Sequence[FeatureSample]) -> FeatureBatch:
    pad = torch.nn.utils.rnn.pad_sequence
    return FeatureBatch(
        tokens=pad([sample.tokens for sample in samples], batch_first=True),
        mask=pad([sample.mask for sample in samples], batch_first=True),
        features=pad([sample.features for sample in samples], batch_first=True),
    )


def _groups(lengths: Sequence[int], batch_tokens: int, shuffle: random.Random | None = None) -> list[list[int]]:
    """Indices in batches of about `batch_tokens` padded tokens, alike lengths together."""
    order = list(range(len(lengths)))
    if shuffle:
        # Lengths in buckets of 16, so that batches differ from epoch to epoch.
        shuffle.shuffle(order)
        order.sort(key=lambda i: lengths[i] // 16)
    else:
        order.sort(key=lambda i: lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and (len(groups[-1]) + 1) * max(lengths[i], lengths[groups[-1][-1]]) <= batch_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    if shuffle:
        shuffle.shuffle(groups)
    return groups
