"""Tokenised conversations on disk."""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import load_file, save_file

from specdec.draft_heads.llama.whole_files import write_whole
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.data.conversations import BadData

Settings = Mapping[str, str | int | None]
INDEX = "index.json"


@dataclass(frozen=True)
class DataShard:
    """A file of concatenated samples: `tokens` int32, `mask` bool; of each, `lengths` int32 and `continues` bool.

    Without `continues`, as in the requests that an engine keeps, each sample is a conversation of its own.
    """

    file: str
    conversations: int
    tokens: int
    assistant_tokens: int


class _Bad(BaseModel):
    """Counts of a `BadData`."""

    counts: dict[str, int]
    first: dict[str, list[str]]


class _Index(BaseModel):
    """The index of prepared data; see `PreparedData`."""

    settings: dict[str, str | int | None]
    sources: list[str]
    shards: list[DataShard]
    read: int
    complete: bool
    bad: _Bad


class PreparedData:
    """A folder of tokenised conversations with masks: `PreparedData(folder).load()`, or a loop over its shards.

    Attributes:
        folder: the folder.
        settings: the settings that determine the data.
        sources: names of the sources.
        shards: in the order of the conversations.
        read: number of entries of the sources that are in the shards or left out.
        complete: whether these are all entries.
        bad: count of entries that were left out or cut.

    Raises:
        ValueError: the folder holds no prepared data.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / INDEX
        try:
            index = _Index.model_validate_json(file.read_bytes())
        except OSError as error:
            raise ValueError(f"{file}: no prepared data: {error.strerror}; prepare it first") from None
        except ValidationError:
            raise ValueError(f"{file}: not an index of prepared data; remove the folder and prepare again") from None
        self.folder = folder
        self.settings: Settings = index.settings
        self.sources, self.shards, self.read, self.complete = index.sources, index.shards, index.read, index.complete
        self.bad = BadData()
        self.bad.counts.update(index.bad.counts)
        self.bad.first.update(index.bad.first)

    @classmethod
    def begin(cls, folder: Path, settings: Settings, sources: Sequence[str]) -> "PreparedData":
        """Open data of these settings, or begin it.

        Raises:
            ValueError: the folder holds data of other settings.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / INDEX).exists() and (prepared := cls(folder)).shards:
            for name, value in settings.items():
                if (old := prepared.settings.get(name)) != value:
                    made = f"made with {name} {old!s:.16}, not {value!s:.16}"
                    raise ValueError(f"{folder}: {made}; remove it or give another folder")
            return prepared
        nothing = {"sources": list(sources), "shards": [], "read": 0, "complete": False}
        write_json(folder / INDEX, {"settings": dict(settings), **nothing, "bad": {"counts": {}, "first": {}}})
        return cls(folder)

    @property
    def conversations(self) -> int:
        return sum(shard.conversations for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def assistant_tokens(self) -> int:
        return sum(shard.assistant_tokens for shard in self.shards)

    def __iter__(self) -> Iterator[list[Sample]]:
        """Yield the conversations of each shard.

        Raises:
            ValueError: the data is not complete.
        """
        if not self.complete:
            raise ValueError(f"{self.folder}: not all is prepared; give the command that began it again")
        for shard in self.shards:
            tensors = load_file(self.folder / shard.file)
            lengths = tensors["lengths"].tolist()
            # In the size that they have on disk: numbers of Python take ten times as much.
            parts = (torch.split(tensors[name], lengths) for name in ("tokens", "mask"))
            numbers = ([part.numpy().tobytes() for part in of_one] for of_one in zip(*parts, strict=True))
            continues = tensors["continues"].tolist() if "continues" in tensors else [False] * len(lengths)
            yield [Sample(array("i", own), mask, same) for (own, mask), same in zip(numbers, continues, strict=True)]

    def load(self) -> list[Sample]:
        """Return all conversations, in the order of the sources.

        Raises:
            ValueError: the data is not complete.
        """
        return [sample for shard in self for sample in shard]

    def add(self, samples: Sequence[Sample]) -> None:
        """Write one shard, unless `samples` is empty, and the index."""
        if samples:
            tokens = [token for sample in samples for token in sample.token_ids]
            mask = [said for sample in samples for said in sample.mask]
            tensors = {
                "tokens": torch.tensor(tokens, dtype=torch.int32),
                "mask": torch.tensor(mask, dtype=torch.bool),
                "lengths": torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int32),
                "continues": torch.tensor([sample.continues for sample in samples]),
            }
            shard = DataShard(f"samples-{len(self.shards):05d}.safetensors", len(samples), len(tokens), sum(mask))
            # If the run is killed before the index is written, the next one makes this shard again.
            write_whole(self.folder / shard.file, lambda new: save_file(tensors, new))
            self.shards.append(shard)
        totals = {name: getattr(self, name) for name in ("conversations", "tokens", "assistant_tokens")}
        index = {
            "settings": dict(self.settings),
            "sources": self.sources,
            "read": self.read,
            "complete": self.complete,
            **totals,
            "bad": {"counts": self.bad.counts, "first": self.bad.first},
            "shards": [asdict(shard) for shard in self.shards],
        }
        write_json(self.folder / INDEX, index)


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object, as `write_whole` does."""
    write_whole(file, lambda new: new.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8"))
