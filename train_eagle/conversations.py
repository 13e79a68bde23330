"""Conversations from files and data sets, and an account of what of them is no use."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from specdec.train_eagle.chat_mask import BadConversation, Message, Sample, encode

__all__ = [
    "BadData",
    "DatasetSource",
    "Entry",
    "FileSource",
    "Message",
    "Place",
    "Sample",
    "Source",
    "encode",
    "open_source",
    "parse",
    "read",
    "write_conversations",
]

# Also ShareGPT's names.
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
# `name` or `owner/name`, perhaps with a split.
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


class Place(NamedTuple):
    """Where an entry stands: the source's name, and its line or row, counted from 1."""

    source: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}"


class Entry(NamedTuple):
    """What a source holds at a place: a JSON value, or why none can be read."""

    place: Place
    value: object

    def messages(self) -> list[Message]:
        """The conversation.

        Raises:
            BadConversation: there is none that can be trained on.
        """
        if isinstance(self.value, BadConversation):
            raise self.value
        return parse(self.value)


class FileSource:
    """A file of JSON objects, one a line or all in one array.

    Raises:
        ValueError: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self.name = str(file)
        self._file = file
        try:
            file.open("rb").close()
        except OSError as error:
            raise ValueError(f"{file}: cannot be read: {error.strerror}; give a JSONL file or a data set") from None

    def digest(self) -> str:
        """SHA-256 of the content, in hex."""
        with self._file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()

    def __iter__(self) -> Iterator[Entry]:
        # A byte that is no UTF-8 becomes a lone surrogate, and spoils only the message that it stands in.
        with self._file.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
            first = next((line for line in lines if line.strip()), "")
            lines.seek(0)
            is_array = first.lstrip().startswith("[") and self._file.suffix != ".jsonl"
            for line, value in _array(lines.read()) if is_array else _lines(lines):
                yield Entry(Place(self.name, line), value)


class DatasetSource:
    """A split of a data set of the Hugging Face `datasets` library, or of a local folder that it can read.

    Args:
        name: as for `datasets.load_dataset`, and behind a colon the split; needed where there are several.

    Raises:
        ValueError: it cannot be loaded, or the split is unknown or missing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            import datasets
        except ImportError:
            raise ValueError(f"{name}: data sets need the datasets library; pip install 'specdec[train]'") from None
        path, _, split = name.partition(":")
        try:
            splits = [split] if split else datasets.get_dataset_split_names(path)
            self._rows: Any = datasets.load_dataset(path, split=splits[0]) if len(splits) == 1 else None
        except Exception as error:  # of the hub, the network, a cache, a format
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{name}: neither a file nor a data set that can be loaded: {reason}") from None
        if self._rows is None:
            raise ValueError(f"{name}: the data set has several splits; give {path}:SPLIT, of {', '.join(splits)}")

    def digest(self) -> str:
        """What `datasets` tells versions of the data apart by."""
        return str(self._rows._fingerprint)

    def __iter__(self) -> Iterator[Entry]:
        for row, value in enumerate(self._rows, 1):
            yield Entry(Place(self.name, row), value)


Source = FileSource | DatasetSource


def open_source(name: str | Path) -> Source:
    """The file of that name, or else the data set.

    Raises:
        ValueError: there is neither.
    """
    path, text = Path(name), str(name)
    is_folder = Path(text.partition(":")[0]).is_dir()
    may_be_dataset = is_folder or (_DATASET.fullmatch(text) and path.suffix not in (".json", ".jsonl"))
    return DatasetSource(text) if may_be_dataset and not path.is_file() else FileSource(path)


def read(sources: Iterable[Source], limit: int | None = None) -> Iterator[Entry]:
    """The entries of all sources in order, at most `limit` of each; blank lines are none."""
    for source in sources:
        yield from islice(source, limit)


class BadData:
    """What was not used as it stands, by reason.

    Attributes:
        counts: entries of each reason.
        first: the first three of them, as `file:line`.

    Args:
        strict: refuse the first instead.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()
        self.first: dict[str, list[str]] = {}

    def add(self, error: BadConversation, place: Place) -> None:
        """Count an entry.

        Raises:
            ValueError: it is not to be left out but refused.
        """
        if self.strict:
            raise ValueError(f"{place}: {error}")
        self.counts[error.reason] += 1
        first = self.first.setdefault(error.reason, [])
        if len(first) < 3:
            first.append(f"{place.source}:{place.line}")

    def table(self) -> str:
        """A row for each reason, the most frequent first; empty if there is none."""
        if not self.counts:
            return ""
        width = max(map(len, self.counts))
        rows = [f"{'bad data':{width}}  how many  first at"]
        for reason, count in self.counts.most_common():
            rows.append(f"{reason:{width}}  {count:8,}  {', '.join(self.first[reason])}")
        return "\n".join(rows)


def write_conversations(file: Path, conversations: Sequence[Sequence[Message]]) -> None:
    """One `{"messages": [...]}` a line."""
    with file.open("a", encoding="utf-8") as lines:
        for messages in conversations:
            lines.write(json.dumps({"messages": list(messages)}, ensure_ascii=False) + "\n")


def parse(value: object) -> list[Message]:
    """The conversation in an object's `messages` or `conversations`: turns by role and content, or ShareGPT's from
    and value.

    Raises:
        BadConversation: there is none, or not one that can be trained on.
    """
    if not isinstance(value, dict):
        raise BadConversation("not a JSON object", f'{_shown(value)}; write it as {{"messages": [...]}}')
    turns = _first_of(value, "messages", "conversations")
    if not isinstance(turns, list):
        raise BadConversation("no conversation", "give the turns as a list, in messages or conversations")
    if not turns:
        raise BadConversation("empty conversation", "give at least a question and an answer")
    messages = [_message(turn) for turn in turns]
    if not any(message["role"] == "assistant" for message in messages):
        raise BadConversation("no assistant turn", "there is nothing to train on")
    return messages


def _message(turn: object) -> Message:
    if not isinstance(turn, dict):
        raise BadConversation("turn is no object", f"{_shown(turn)}; give role and content")
    role, content = _first_of(turn, "role", "from"), _first_of(turn, "content", "value")
    if not isinstance(role, str) or role not in ROLES:
        raise BadConversation("unknown role", f"{_shown(role)}; use {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise BadConversation("content is no string", f"{_shown(content)} of the {role}; give its text")
    if not content.strip():
        raise BadConversation("empty content", f"the {role} says nothing; leave out the turn or the conversation")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise BadConversation("content is no UTF-8 text", f"{error.reason} at character {error.start + 1}") from None
    return {"role": ROLES[role], "content": content}


def _first_of(value: dict[str, Any], *keys: str) -> Any:
    """The first that is given; a column that a row of a data set lacks is None."""
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _lines(lines: Iterable[str]) -> Iterator[tuple[int, object]]:
    """Line numbers and values; of a line that is no JSON, why."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                yield number, BadConversation("malformed JSON", f"{error.msg} at column {error.colno}")
            except (ValueError, RecursionError) as error:  # numbers and nesting beyond what Python reads
                yield number, BadConversation("malformed JSON", str(error))


def _array(text: str) -> Iterator[tuple[int, object]]:
    """Line numbers and values of an array's elements; where it breaks off, why."""
    decoder, gap = json.JSONDecoder(), re.compile(r"[\s,]*")
    line, at, end = 1, 0, text.index("[") + 1
    while True:
        start = gap.match(text, end).end()  # type: ignore[union-attr]  # it matches nothing, too
        line += text.count("\n", at, start)
        at = start
        if text[at : at + 1] == "]":
            return
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield line, BadConversation("malformed JSON", "the array breaks off here; what follows is not read")
            return
        yield line, value
