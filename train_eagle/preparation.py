"""Conversations turned into tokens and masks on disk."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import track

from specdec.models.hub import shown_name
from specdec.models.tokenizer import load_pretrained
from specdec.train_eagle.chat_mask import BadConversation, ChatMask, Sample
from specdec.train_eagle.conversations import BadData, Entry, open_source, read
from specdec.train_eagle.prepared_data import PreparedData, Settings
from specdec.train_eagle.stage_settings import Long

FORMAT = 1


def prepare(
    model: Path,
    sources: Sequence[str | Path],
    out: Path,
    max_length: int = 2048,
    long: Long = "truncate",
    strict: bool = False,
    limit: int | None = None,
    shard_size: int = 2048,
) -> PreparedData:
    """Write tokens and masks of conversations to the folder `out`, resuming an earlier run.

    Args:
        model: checkpoint folder whose tokenizer and chat template are used.
        sources: JSONL files, JSON arrays, or data sets as for `DatasetSource`.
        out: folder to write.
        max_length: most tokens of a conversation.
        long: whether longer ones are truncated to their first `max_length` tokens or skipped.
        strict: refuse the first bad conversation, which includes too long ones, instead of counting it.
        limit: most entries per source.
        shard_size: conversations per shard.

    Raises:
        ValueError: a source, the tokenizer or a setting is unusable; `out` was made with other settings; `strict` and
            a conversation is bad; nothing is left to train on.
    """
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}; it must be at least 2")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    chat = ChatMask(load_pretrained(model))
    opened = [open_source(source) for source in sources]
    settings: Settings = {
        "format": FORMAT,
        "model": shown_name(model),
        "tokenizer": chat.digest,
        "inputs": hashlib.sha256(" ".join(source.digest() for source in opened).encode()).hexdigest(),
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
    """Return the part of an entry that can be trained on, None if there is none; count problems in `bad`."""
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
