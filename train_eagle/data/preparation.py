"""Conversations turned into tokens and masks on disk."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from rich.console import Console
from rich.progress import track

from specdec.kernels.types.threads import usable_processors
from specdec.models.head_fit import VOCABULARY
from specdec.models.hub import shown_name
from specdec.models.tokenizer import load_pretrained, vocabulary_digest
from specdec.train_eagle.data.chat_mask import BadConversation, ChatMask, Message, Sample
from specdec.train_eagle.data.conversations import BadData, Entry, Place, open_source, read
from specdec.train_eagle.data.prepared_data import PreparedData, Settings
from specdec.train_eagle.data.provenance import check_answers
from specdec.train_eagle.data.stage_settings import PrepareSettings

FORMAT = 2
# Conversations at once from which on all processors tokenise them: processes take a moment to start.
MANY = 512


def prepare(model: Path, given: PrepareSettings, shard_size: int = 2048) -> PreparedData:
    """Write tokens and masks of conversations to the folder `given.out`, resuming an earlier run.

    Args:
        model: checkpoint folder whose tokenizer and chat template are used.
        given: with `strict`, a conversation that is too long is a bad one.
        shard_size: conversations per shard.

    Raises:
        ValueError: a source or the tokenizer is unusable; a source has answers of a target with other tokens; `out` was
            made with other settings; `strict` and a conversation is bad; nothing is left to train on.
    """
    for source in given.data:
        check_answers(source, model)
    chat = ChatMask(load_pretrained(model))
    opened = [open_source(source) for source in given.data]
    settings: Settings = {
        "format": FORMAT,
        "model": shown_name(model),
        "tokenizer": chat.digest,
        VOCABULARY: vocabulary_digest(model),
        "inputs": hashlib.sha256(" ".join(source.digest() for source in opened).encode()).hexdigest(),
        "max_length": given.max_length,
        "long": given.long,
        "limit": given.limit,
    }
    prepared = PreparedData.begin(given.out, settings, [source.name for source in opened])
    if given.strict and prepared.bad.counts:
        raise ValueError(f"{given.out}: holds data prepared without strict; remove it or give another folder")
    prepared.bad.strict = given.strict
    if not prepared.complete:
        entries = islice(read(opened, given.limit), prepared.read, None)
        _fill(prepared, _tokenised(chat, entries, shard_size, given.processes), shard_size)
    if not prepared.shards:
        found = [f"{count} {reason} ({prepared.bad.first[reason][0]})" for reason, count in prepared.bad.counts.items()]
        raise ValueError(f"nothing to train on in {', '.join(prepared.sources)}: {', '.join(found) or 'no entries'}")
    return prepared


# An entry's place, and its samples or why it has none.
Tokenised = tuple[Place, list[Sample] | BadConversation]


def _tokenised(chat: ChatMask, entries: Iterable[Entry], size: int, processes: int | None) -> Iterator[Tokenised]:
    """Yield the entries through the chat template, in order; `size` of them are tokenised at once."""
    entries = iter(entries)
    while batch := list(islice(entries, size)):
        read_as = [_messages(entry) for entry in batch]
        good = [messages for messages in read_as if not isinstance(messages, BadConversation)]
        found = iter(_encode_all(chat, good, processes) if good else ())
        for entry, messages in zip(batch, read_as, strict=True):
            yield entry.place, messages if isinstance(messages, BadConversation) else next(found)


def _messages(entry: Entry) -> list[Message] | BadConversation:
    try:
        return entry.messages()
    except BadConversation as error:
        return error


def _encode_all(
    chat: ChatMask, conversations: Sequence[list[Message]], processes: int | None
) -> list[list[Sample] | BadConversation]:
    """Tokenise conversations, in several processes if there are many."""
    if processes is None:
        processes = usable_processors() if len(conversations) >= MANY else 1

    def encode(messages: list[Message]) -> dict[str, Any]:
        try:
            # `datasets` gives each message all keys of any.
            samples = chat.encode([{key: text for key, text in each.items() if text is not None} for each in messages])
        except BadConversation as error:
            return {"token_ids": [], "mask": [], "reason": error.reason, "detail": error.detail}
        token_ids, mask = ([getattr(sample, name) for sample in samples] for name in ("token_ids", "mask"))
        return {"token_ids": token_ids, "mask": mask, "reason": None, "detail": None}

    given = datasets.Dataset.from_dict({"messages": conversations})
    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows = given.map(
            encode,
            input_columns="messages",
            remove_columns="messages",
            num_proc=processes if processes > 1 else None,
            keep_in_memory=True,
            # Nothing is kept for another run, so the function needs no name.
            new_fingerprint="tokenised",
            features=datasets.Features(
                token_ids=datasets.List(datasets.List(datasets.Value("int32"))),
                mask=datasets.List(datasets.List(datasets.Value("bool"))),
                reason=datasets.Value("string"),
                detail=datasets.Value("string"),
            ),
        )
    finally:
        if had_bars:
            datasets.enable_progress_bars()
    return [
        [Sample(*pair) for pair in zip(row["token_ids"], row["mask"], strict=True)]
        if row["reason"] is None
        else BadConversation(row["reason"], row["detail"])
        for row in rows
    ]


def _fill(prepared: PreparedData, tokenised: Iterable[Tokenised], shard_size: int) -> None:
    console = Console(stderr=True)
    samples: list[Sample] = []
    for place, found in track(tokenised, "preparing", console=console, transient=True, disable=not console.is_terminal):
        continues = False
        for each in found if isinstance(found, list) else [found]:
            if sample := _trainable(each, place, prepared.settings, prepared.bad):
                samples.append(sample._replace(continues=continues))
                continues = True
        prepared.read += 1
        if len(samples) >= shard_size:
            prepared.add(samples)
            samples = []
    prepared.complete = True
    prepared.add(samples)


def _trainable(found: Sample | BadConversation, place: Place, settings: Settings, bad: BadData) -> Sample | None:
    """Return the part of a sample that can be trained on, None if there is none; count problems in `bad`."""
    most = settings["max_length"]
    assert isinstance(most, int)
    try:
        if isinstance(found, BadConversation):
            raise found
        sample = found
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
            bad.add(BadConversation("too long, cut", problem), place)
        return sample
    except BadConversation as error:
        bad.add(error, place)
        return None
