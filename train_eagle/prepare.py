"""Conversations to tokens and masks, on disk: the first stage of training a head.

    python -m specdec.train_eagle.prepare --model MODEL --data a.jsonl HuggingFaceH4/ultrachat_200k:train_sft --out DATA

What cannot be trained on is left out and counted. A run that was killed goes on behind its last full shard when the
same command is given again.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdec.train_eagle.chat_mask import BadConversation, ChatMask, Sample, preview
from specdec.train_eagle.conversations import BadData, Entry, Source, open_source, read

Settings = Mapping[str, str | int | None]
FORMAT = 1
INDEX = "index.json"


@dataclass(frozen=True)
class Shard:
    """A file of conversations laid end to end: `tokens` int32 and `mask` bool, and their `lengths` int32."""

    file: str
    conversations: int
    tokens: int
    assistant_tokens: int


class PreparedData:
    """A folder of tokenised conversations with masks: `PreparedData(folder).load()`, or a loop over its shards.

    Attributes:
        folder: where it is.
        settings: what makes the data what it is; another value makes other data.
        sources: their names.
        shards: in the order of the conversations.
        read: entries of the sources that are in the shards or left out.
        complete: whether these are all.
        bad: what was left out or cut.

    Raises:
        ValueError: the folder holds none.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / INDEX
        try:
            index = json.loads(file.read_text(encoding="utf-8"))
            self.folder = folder
            self.settings: Settings = index["settings"]
            self.sources: list[str] = index["sources"]
            self.shards = [Shard(**shard) for shard in index["shards"]]
            self.read: int = index["read"]
            self.complete: bool = index["complete"]
            self.bad = BadData()
            self.bad.counts.update(index["bad"]["counts"])
            self.bad.first.update(index["bad"]["first"])
        except OSError as error:
            raise ValueError(f"{file}: no prepared data: {error.strerror}; prepare it first") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(f"{file}: not an index of prepared data; remove the folder and prepare again") from None

    @classmethod
    def begin(cls, folder: Path, settings: Settings, sources: Sequence[str]) -> "PreparedData":
        """What is already there of these settings, or else nothing yet.

        Raises:
            ValueError: what is there was made with other settings.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / INDEX).exists() and (prepared := cls(folder)).shards:
            for name, value in settings.items():
                if (old := prepared.settings.get(name)) != value:
                    made = f"made with {name} {old!s:.16}, not {value!s:.16}"
                    raise ValueError(f"{folder}: {made}; remove it or give another folder")
            return prepared
        nothing = {"sources": list(sources), "shards": [], "read": 0, "complete": False}
        _write_json(folder / INDEX, {"settings": dict(settings), **nothing, "bad": {"counts": {}, "first": {}}})
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
        """The conversations of each shard.

        Raises:
            ValueError: more are still to come.
        """
        if not self.complete:
            raise ValueError(f"{self.folder}: not all is prepared; give the command that began it again")
        for shard in self.shards:
            tensors = load_file(self.folder / shard.file)
            lengths = tensors["lengths"].tolist()
            parts = (torch.split(tensors[name], lengths) for name in ("tokens", "mask"))
            yield [Sample(tokens.tolist(), mask.tolist()) for tokens, mask in zip(*parts, strict=True)]

    def load(self) -> list[Sample]:
        """All conversations, in the order of the sources.

        Raises:
            ValueError: more are still to come.
        """
        return [sample for shard in self for sample in shard]

    def add(self, samples: Sequence[Sample]) -> None:
        """Write one shard, unless there are no samples, and the index."""
        if samples:
            tokens = [token for sample in samples for token in sample.token_ids]
            mask = [said for sample in samples for said in sample.mask]
            tensors = {
                "tokens": torch.tensor(tokens, dtype=torch.int32),
                "mask": torch.tensor(mask, dtype=torch.bool),
                "lengths": torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int32),
            }
            shard = Shard(f"samples-{len(self.shards):05d}.safetensors", len(samples), len(tokens), sum(mask))
            # A run killed before the index is written makes this shard again.
            _replace(self.folder / shard.file, lambda new: save_file(tensors, new))
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
        _write_json(self.folder / INDEX, index)


def prepare(
    model: Path,
    sources: Sequence[str | Path],
    out: Path,
    max_length: int = 2048,
    long: Literal["truncate", "skip"] = "truncate",
    strict: bool = False,
    limit: int | None = None,
    shard_size: int = 2048,
) -> PreparedData:
    """Tokens and masks of the sources' conversations, in the folder `out`; goes on where an earlier run ended.

    Args:
        model: checkpoint folder whose tokenizer and chat template are used.
        sources: JSONL files, JSON arrays, or data sets as for `DatasetSource`.
        out: folder to write.
        max_length: most tokens of a conversation.
        long: what becomes of longer ones: their first `max_length` tokens, or nothing.
        strict: refuse the first bad conversation, one that is too long included, instead of counting it.
        limit: most entries of each source.
        shard_size: conversations of a shard.

    Raises:
        ValueError: a source, the tokenizer or a setting is no good; `out` was made with other settings; `strict` and
            something is bad; nothing is left to train on.
    """
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}; it must be at least 2")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    chat = ChatMask(load_tokenizer(model))
    opened = [open_source(source) for source in sources]
    settings: Settings = {
        "format": FORMAT,
        "model": model.resolve().name,
        "tokenizer": chat.digest,
        "inputs": _digest(opened),
        "max_length": max_length,
        "long": long,
        "limit": limit,
    }
    prepared = PreparedData.begin(out, settings, [source.name for source in opened])
    if strict and prepared.bad.counts:
        raise ValueError(f"{out}: holds data prepared without strict; remove it or give another folder")
    prepared.bad.strict = strict
    if not prepared.complete:
        _fill(prepared, chat, islice(read(opened, limit), prepared.read, None), shard_size)
    if not prepared.shards:
        found = [f"{count} {reason} ({prepared.bad.first[reason][0]})" for reason, count in prepared.bad.counts.items()]
        raise ValueError(f"nothing to train on in {', '.join(prepared.sources)}: {', '.join(found) or 'no entries'}")
    return prepared


def _fill(prepared: PreparedData, chat: ChatMask, entries: Iterable[Entry], shard_size: int) -> None:
    console = Console(stderr=True)
    samples: list[Sample] = []
    for entry in track(entries, "preparing", console=console, transient=True, disable=not console.is_terminal):
        if sample := _sample(chat, entry, prepared.settings, prepared.bad):
            samples.append(sample)
        prepared.read += 1
        if len(samples) == shard_size:
            prepared.add(samples)
            samples = []
    prepared.complete = True
    prepared.add(samples)


def _sample(chat: ChatMask, entry: Entry, settings: Settings, bad: BadData) -> Sample | None:
    """What can be trained on of an entry; None is nothing. What is bad about it goes to `bad`."""
    most = settings["max_length"]
    assert isinstance(most, int)
    try:
        sample = chat.encode(entry.messages())
        if not any(sample.mask):
            raise BadConversation("no token of the assistant", "the chat template writes nothing of what it says")
        length = len(sample.token_ids)
        if length > most:
            problem = f"{length} tokens, more than max_length {most}; raise it"
            if settings["long"] == "skip":
                raise BadConversation("too long, left out", problem)
            sample = Sample(sample.token_ids[:most], sample.mask[:most])
            if not any(sample.mask):
                raise BadConversation("too long, no token of the assistant left", problem)
            bad.add(BadConversation("too long, cut", problem), entry.place)
        return sample
    except BadConversation as error:
        bad.add(error, entry.place)
        return None


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder.

    Raises:
        ValueError: no such folder, or it cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a checkpoint with a tokenizer")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises a bare Exception, transformers many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{folder}: the tokenizer cannot be read: {reason}") from None
    return tokenizer


def _digest(sources: Iterable[Source]) -> str:
    return hashlib.sha256(" ".join(source.digest() for source in sources).encode()).hexdigest()


def _replace(file: Path, write: Callable[[Path], Any]) -> None:
    """Have `file` written whole or not at all."""
    new = file.with_name(f"{file.name}.tmp")
    write(new)
    new.replace(file)


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    _replace(file, lambda new: new.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8"))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder of the target")
    parser.add_argument("--data", nargs="+", required=True, help="JSONL files, JSON arrays, data sets as NAME:SPLIT")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--max-length", type=int, default=2048, help="most tokens of a conversation")
    parser.add_argument("--long", choices=["truncate", "skip"], default="truncate", help="what to do with longer ones")
    parser.add_argument("--strict", action="store_true", help="refuse the first bad conversation")
    parser.add_argument("--limit", type=int, help="most entries of each source")
    parser.add_argument("--preview", type=int, default=0, metavar="N", help="show the first N, what is trained marked")
    args = parser.parse_args(words)
    try:
        prepared = prepare(args.model, args.data, args.out, args.max_length, args.long, args.strict, args.limit)
    except ValueError as error:
        parser.exit(2, f"prepare: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "prepare: interrupted; the same command goes on\n")
    if args.preview > 0:
        preview(Console(), load_tokenizer(args.model), next(iter(prepared))[: args.preview])
    if prepared.bad.counts:
        print(prepared.bad.table())
    share = prepared.assistant_tokens / prepared.tokens
    print(f"{prepared.conversations:,} conversations, {prepared.tokens:,} tokens, {share:.0%} trained, in {args.out}")


if __name__ == "__main__":
    main()
